//! The backend on the emulated driver (tests/cuda); what of it needs a GPU as well is ignored where there is none.

use std::sync::Once;

use super::*;
use crate::backend::Mode;
use crate::backend::gpu::Gpu;
use crate::backend::gpu::kernels::{Kernel, Name};
use crate::backend::gpu::splits::every_split;
use crate::backend::gpu::tests::{
    Extent, every_kernel, fast_products, faults_on_purpose, formats_are_refused, same_with_wgmma,
};
use crate::backend::gpu::tiers;

#[path = "../../../tests/support/emulated_cuda.rs"]
#[allow(dead_code)]
mod emulated_cuda;

/// The emulated driver takes the place of the machine's: it has the name under which that is looked for.
fn emulated(folder: &std::path::Path) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the library is made by the tests, and has nothing that runs when it is loaded but its lists of kernels.
        let library = unsafe { libloading::Library::new(folder.join("libcuda.so")) }.unwrap();
        std::mem::forget(library);
    });
}

fn emulated_gpu() -> Cuda {
    emulated(emulated_cuda::folder());
    let cuda = Cuda::open(0).unwrap();
    assert_eq!(cuda.device(), "Emulated GPU (cuda:0, driver of CUDA 12.2)");
    cuda
}

fn gpu() -> Cuda {
    let cuda = Cuda::open(0).unwrap();
    assert!(!cuda.device().contains("Emulated"), "{}", cuda.device());
    cuda
}

#[test]
fn every_kernel_emulated() {
    every_kernel(&Gpu::new(emulated_gpu(), None), Extent::Small);
}

#[test]
fn every_split_emulated() {
    every_split(emulated_gpu());
}

#[test]
fn fast_products_emulated() {
    fast_products(&Gpu::new(emulated_gpu(), None).in_mode(Mode::Fast));
}

/// On the emulated driver, with the machine code for it and without.
fn wgmma_computes_the_same(mode: Mode) {
    let with = Gpu::new(emulated_gpu(), None).in_mode(mode);
    let without = Gpu::new(Cuda::open_with(0, images::Prefer::Ptx).unwrap(), None).in_mode(mode);
    same_with_wgmma(&with, &without, Extent::Small);
}

#[test]
fn exact_wgmma_computes_the_same_emulated() {
    wgmma_computes_the_same(Mode::Exact);
}

#[test]
fn fast_wgmma_computes_the_same_emulated() {
    wgmma_computes_the_same(Mode::Fast);
}

#[test]
fn faults_and_formats_emulated() {
    faults_on_purpose(emulated_gpu);
    formats_are_refused(&Gpu::new(emulated_gpu(), None));
}

#[test]
fn experts_in_tiers_emulated() {
    tiers::tests::same_bits(emulated_gpu);
    tiers::tests::batches(emulated_gpu);
    tiers::tests::too_little(emulated_gpu);
}

/// Uploads go beside launches, in the order that is asked for and no other.
fn uploads_in_order(cuda: &Cuda) {
    let floats = |value: f32| value.to_le_bytes().repeat(1000);
    let [x, y] = [0, 1].map(|_| cuda.allocate(4000, "a test").unwrap());
    cuda.write(&x, 0, &floats(0.0)).unwrap();
    let add = |constants: &[u32]| {
        let kernel = Kernel::plain(Name::Add);
        let (buffers, shared_bytes) = (&[&x, &y], 0);
        cuda.launch(&Launch { kernel, groups: [2, 1, 1], buffers, constants, shared_bytes }).unwrap();
    };
    for step in 0..100u16 {
        cuda.uploads_after_launches().unwrap();
        cuda.upload(&y, 0, &floats(step.into())).unwrap();
        cuda.launches_after_uploads().unwrap();
        add(&[1000]);
    }
    let mut back = vec![0; 4000];
    cuda.read(&x, 0, &mut back).unwrap();
    assert!(back == floats(4950.0));
    // More than all pinned memory together.
    let bytes: Vec<u8> = (0..70 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let large = cuda.allocate(bytes.len() as u64, "a test").unwrap();
    cuda.upload(&large, 0, &bytes).unwrap();
    cuda.upload(&large, 4, &[]).unwrap();
    cuda.launches_after_uploads().unwrap();
    let mut back = vec![0; bytes.len()];
    cuda.read(&large, 0, &mut back).unwrap();
    assert!(back == bytes);
}

#[test]
fn uploads_in_order_emulated() {
    uploads_in_order(&emulated_gpu());
}

/// Bytes of many staging buffers go there and come back, also parts, whoever asks for it.
fn copies(cuda: &Cuda) {
    let bytes: Vec<u8> = (0..40 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let buffer = cuda.allocate(bytes.len() as u64, "a test").unwrap();
    cuda.write(&buffer, 0, &bytes).unwrap();
    let mut back = vec![0; bytes.len()];
    cuda.read(&buffer, 0, &mut back).unwrap();
    assert!(back == bytes);
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let (cuda, buffer) = (cuda, &buffer);
            scope.spawn(move || {
                let at = u64::from(thread) * (9 << 20) + 4;
                let mut back = vec![0; 9 << 20];
                cuda.write(buffer, at, &vec![thread; back.len()]).unwrap();
                cuda.read(buffer, at, &mut back).unwrap();
                assert!(back.iter().all(|&byte| byte == thread));
            });
        }
    });
    cuda.read(&buffer, 0, &mut back[..4]).unwrap();
    assert_eq!(back[..4], bytes[..4]);
    cuda.read(&buffer, 0, &mut []).unwrap();
    cuda.write(&buffer, bytes.len() as u64, &[]).unwrap();
}

#[test]
fn copies_emulated() {
    copies(&emulated_gpu());
}

/// What a launch that was asked for uses stays until it is done; sums come in the order of the launches.
fn launches_in_order(cuda: &Cuda) {
    let add = |x: &Buffer, y: &Buffer| {
        let launch = Launch {
            kernel: Kernel::plain(Name::Add),
            groups: [2, 1, 1],
            buffers: &[x, y],
            constants: &[1000],
            shared_bytes: 0,
        };
        cuda.launch(&launch).unwrap();
    };
    let floats = |value: f32| value.to_le_bytes().repeat(1000);
    let [x, y] = [1.0f32, 2.0].map(|value| {
        let buffer = cuda.allocate(4000, "a test").unwrap();
        cuda.write(&buffer, 0, &floats(value)).unwrap();
        buffer
    });
    add(&x, &y); // 3
    cuda.write(&y, 0, &floats(10.0)).unwrap();
    add(&x, &y); // 13
    add(&x, &x); // 26
    drop(y);
    let mut back = vec![0; 4000];
    cuda.read(&x, 0, &mut back).unwrap();
    assert!(back == floats(26.0));
    cuda.wait().unwrap();
}

#[test]
fn launches_in_order_emulated() {
    launches_in_order(&emulated_gpu());
}

#[test]
fn every_kernel_has_one_image() {
    let kernels = Kernel::all().into_iter().filter(|kernel| !kernel.name.is_for_halves());
    let mut functions: Vec<String> = kernels.map(Kernel::function).collect();
    let mut held: Vec<&str> = images::IMAGES.iter().flat_map(|image| image.kernels).copied().collect();
    functions.sort();
    held.sort();
    assert_eq!(functions, held);
    for image in images::IMAGES {
        assert!(image.cubins.iter().all(|(_, bytes)| bytes.starts_with(b"\x7fELF")), "{}", image.file);
        // Those for one architecture have nothing for others.
        if ["wide", "wide_experts"].contains(&image.file) {
            assert!(image.ptx.is_none() && image.cubins.len() == 1 && image.cubins[0].0 == 90, "{}", image.file);
            continue;
        }
        // Those with tensor cores' products of bf16 are for newer devices.
        let oldest = if ["ranges", "stream", "stream_experts", "tile", "tile_experts"].contains(&image.file) {
            80
        } else {
            images::OLDEST
        };
        let (target, text) = image.ptx.unwrap();
        assert!(text.contains("\n.version 8.2\n") && text.contains(&format!("\n.target sm_{oldest}\n")));
        assert_eq!((target, image.cubins[0].0), (oldest, oldest));
    }
}

/// The images are of the sources that are there: build.py was run after the last change.
#[test]
fn images_are_of_these_sources() {
    use sha2::{Digest, Sha256};
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/cuda");
    let sums = std::fs::read_to_string(folder.join("SHA256SUMS")).unwrap();
    for line in sums.lines() {
        let (sum, name) = line.split_once("  ").unwrap();
        let found: String = Sha256::digest(std::fs::read(folder.join(name)).unwrap())
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(found, sum, "{name}: run kernels/cuda/build.py");
    }
    let sources = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    for name in sources.filter(|name| name.ends_with(".cu") || name.ends_with(".cuh")) {
        assert!(sums.contains(&format!("  {name}\n")), "{name}: run kernels/cuda/build.py");
    }
}

/// Threads of a group are those that the host starts.
#[test]
fn groups_are_as_the_sources_declare_them() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/cuda");
    let declared: std::collections::BTreeMap<String, u32> = images::IMAGES
        .iter()
        .flat_map(|image| emulated_cuda::kernels(&folder.join(format!("{}.cu", image.file))))
        .map(|(threads, name)| (name, threads))
        .collect();
    for kernel in Kernel::all().into_iter().filter(|kernel| !kernel.name.is_for_halves()) {
        assert_eq!(declared.get(&kernel.function()), Some(&kernel.name.threads()), "{}", kernel.function());
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn copies_and_order_on_a_gpu() {
    copies(&gpu());
    launches_in_order(&gpu());
    uploads_in_order(&gpu());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn experts_in_tiers_on_a_gpu() {
    tiers::tests::same_bits(gpu);
    tiers::tests::batches(gpu);
    tiers::tests::too_little(gpu);
}
