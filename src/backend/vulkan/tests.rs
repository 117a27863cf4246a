//! The driver on whatever device there is: Mesa's software device will do.

use ash::vk;

use super::*;
use crate::backend::gpu::Gpu;
use crate::backend::gpu::kernels::{Kernel, Name};
use crate::backend::gpu::splits::every_split;
use crate::backend::gpu::tests::{Extent, every_kernel, fast_products, faults_on_purpose, formats_are_refused};
use crate::backend::gpu::tiers;
use crate::backend::samples::{formats, matrix, numbers, routed};
use crate::backend::{Backend, Mla, Mode, Places};
use crate::format::Format;

/// Options of tests: COLICONV_VULKAN_VALIDATION=1 in the environment lets the validation layers watch.
fn options() -> Options {
    let validation = std::env::var("COLICONV_VULKAN_VALIDATION").is_ok_and(|value| value == "1");
    Options { validation, ..Options::default() }
}

/// A device; `None`, said aloud, where there is none and COLICONV_REQUIRE_DEVICES does not name `vulkan`.
fn opened(options: Options) -> Option<Vulkan> {
    let required = std::env::var("COLICONV_REQUIRE_DEVICES").unwrap_or_default();
    match Vulkan::open(options) {
        Ok(vulkan) => Some(vulkan),
        Err(fault) if !required.split(',').any(|device| device == "vulkan") => {
            eprintln!("not tested: {fault}");
            None
        }
        Err(fault) => panic!("COLICONV_REQUIRE_DEVICES={required}, but {fault}"),
    }
}

fn failing(vulkan: &Vulkan, call: &'static str, error: vk::Result) {
    *vulkan.0.core.failing.lock().unwrap() = Some((call, error));
}

fn said<T>(result: Result<T>) -> String {
    result.err().map(|fault: Fault| fault.to_string()).unwrap_or_default()
}

/// Bytes that differ everywhere.
fn bytes(count: usize, seed: u32) -> Vec<u8> {
    (0..count as u32).map(|at| (at.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8).collect()
}

/// x + y into x.
fn add(vulkan: &Vulkan, x: &Buffer, y: &Buffer, count: u32) -> Result<()> {
    let kernel = Kernel::plain(Name::Add);
    let (buffers, constants) = (&[x, y], &[count]);
    vulkan.launch(&Launch { kernel, groups: [1, 1, 1], buffers, constants, shared_bytes: 0 })
}

fn values(vulkan: &Vulkan, buffer: &Buffer, count: usize) -> Vec<f32> {
    let mut bytes = vec![0; 4 * count];
    vulkan.read(buffer, 0, &mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

#[test]
fn what_is_written_is_read() {
    let Some(vulkan) = opened(options()) else { return };
    // More than all staging memory together.
    let (large, small) = (bytes(50_000_004, 1), bytes(4096, 2));
    let a = vulkan.allocate(large.len() as u64, "test").unwrap();
    let b = vulkan.allocate(small.len() as u64, "test").unwrap();
    assert_eq!((vulkan.bytes(&a), vulkan.bytes(&b)), (50_000_004, 4096));
    vulkan.write(&a, 0, &large).unwrap();
    vulkan.write(&b, 0, &small).unwrap();
    // Over a part of what was written: the later write holds.
    vulkan.write(&a, 4, &small).unwrap();
    vulkan.write(&a, 1024, &large[..40]).unwrap();
    let mut found = vec![0; large.len()];
    vulkan.read(&a, 0, &mut found).unwrap();
    let mut expected = large.clone();
    expected[4..4100].copy_from_slice(&small);
    expected[1024..1064].copy_from_slice(&large[..40]);
    assert!(found == expected);
    let mut found = vec![0; 100];
    vulkan.read(&b, 3996, &mut found).unwrap();
    assert_eq!(found, small[3996..]);
    vulkan.read(&b, 0, &mut []).unwrap();
    vulkan.write(&b, 0, &[]).unwrap();
}

#[test]
fn launches_are_done_in_order_and_buffers_may_go_before_them() {
    for push_descriptors in [true, false] {
        let Some(vulkan) = opened(Options { push_descriptors, ..options() }) else { return };
        let word = |value: f32| value.to_le_bytes().repeat(64);
        let x = vulkan.allocate(256, "x").unwrap();
        vulkan.write(&x, 0, &word(1.0)).unwrap();
        for step in 0..300 {
            // Given back at once: what is written next into the same place comes after the launch.
            let y = vulkan.allocate(256, "y").unwrap();
            vulkan.write(&y, 0, &word(step as f32)).unwrap();
            add(&vulkan, &x, &y, 64).unwrap();
        }
        assert_eq!(values(&vulkan, &x, 64), [44_851.0; 64], "1 and the numbers below 300");
        vulkan.wait().unwrap();
    }
}

#[test]
fn every_split_changes_no_bit() {
    let Some(vulkan) = opened(options()) else { return };
    every_split(vulkan);
}

#[test]
fn every_kernel_agrees_with_the_reference() {
    let Some(vulkan) = opened(options()) else { return };
    every_kernel(&Gpu::new(vulkan, None), Extent::Small);
}

/// What weights of a format take part in.
fn computed(gpu: &Gpu<Vulkan>, format: Format) -> Vec<f32> {
    let rows = |seed, n: usize, width: usize| gpu.write(&numbers(seed, n * width), width).unwrap();
    let weight = gpu.upload("w", matrix(format, 900, 60, 1)).unwrap();
    let product = gpu.matmul(&weight, &rows(2, 3, 60)).unwrap();
    let embedded = gpu.embed(&weight, &[0, 899, 128, 300, 777]).unwrap();
    let mla = Mla { heads: 12, nope: 60, rope: 4, value: 20, latent: 60 };
    let kv_b = gpu.upload("kv_b", matrix(format, 12 * 80, 60, 3)).unwrap();
    let mut cache = gpu.cache(64).unwrap();
    gpu.append(&mut cache, &rows(4, 20, 64)).unwrap();
    let places = Places::after(18, 2);
    let attended = gpu.attention(&mla, &rows(5, 2, 12 * 64), &kv_b, &cache, &places, None).unwrap();
    let out = [product, embedded, attended].map(|rows| gpu.read(&rows).unwrap()).concat();
    [out, routed(gpu, format, 0..12)].concat()
}

/// On a device that sees little at once weights are in many parts.
#[test]
fn small_buffers_change_no_bit() {
    let small = Options { buffer_bytes: 12 << 10, push_descriptors: false, ..options() };
    let (Some(large), Some(small)) = (opened(options()), opened(small)) else { return };
    assert_eq!(small.limits().buffer_bytes, 12 << 10);
    let (large, small) = (Gpu::new(large, None), Gpu::new(small, None));
    for format in formats() {
        let launched = [&large, &small].map(|gpu| gpu.gpu().launches());
        let bits = |gpu| computed(gpu, format).into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert!(bits(&large) == bits(&small), "{format}");
        let [whole, parts] =
            [(&large, launched[0]), (&small, launched[1])].map(|(gpu, before)| gpu.gpu().launches() - before);
        assert!(parts > whole, "{format}: {whole} launches, {parts} in parts");
    }
    let fault = said(small.write(&[0.0; 4096], 4096));
    assert_eq!(fault, "activations would be a buffer of 16384 bytes, the device has at most 12288 in one");
}

#[test]
fn sums_by_subgroups_have_the_same_bits() {
    let plain = opened(Options { subgroups: Some(false), ..options() });
    let (Some(plain), Some(subgroups)) = (plain, opened(Options { subgroups: Some(true), ..options() })) else {
        return;
    };
    if !subgroups.0.core.subgroups {
        eprintln!("not tested: {} has no subgroups that can be full", subgroups.device());
        return;
    }
    let (plain, subgroups) = (Gpu::new(plain, None), Gpu::new(subgroups, None));
    for format in formats() {
        let bits = |gpu| computed(gpu, format).into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert!(bits(&plain) == bits(&subgroups), "{format}");
    }
    every_kernel(&subgroups, Extent::Small);
}

/// A device with cooperative matrices; `None`, said aloud, where there is none and COLICONV_REQUIRE_DEVICES does not name
/// `cooperative-matrices`.
fn with_matrices(options: Options) -> Option<Vulkan> {
    let vulkan = opened(options)?;
    if vulkan.0.core.matrices.is_some() {
        return Some(vulkan);
    }
    let required = std::env::var("COLICONV_REQUIRE_DEVICES").unwrap_or_default();
    let device = vulkan.device();
    let demanded = required.split(',').any(|device| device == "cooperative-matrices");
    assert!(!demanded, "COLICONV_REQUIRE_DEVICES={required}, but {device} has none");
    eprintln!("not tested: {device} has no cooperative matrices that products can be made of");
    None
}

#[test]
fn products_of_halves_are_near() {
    let Some(vulkan) = with_matrices(options()) else { return };
    fast_products(&Gpu::new(vulkan, None).in_mode(Mode::Fast));
}

#[test]
fn small_buffers_change_no_bit_of_products_of_halves() {
    let small = Options { buffer_bytes: 12 << 10, push_descriptors: false, ..options() };
    let (Some(large), Some(small)) = (with_matrices(options()), with_matrices(small)) else { return };
    let [large, small] = [large, small].map(|vulkan| Gpu::new(vulkan, None).in_mode(Mode::Fast));
    for format in formats() {
        let bits = |gpu| computed(gpu, format).into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert!(bits(&large) == bits(&small), "{format}");
    }
}

/// What a device without cooperative matrices has no kernels for is not asked of it.
#[test]
fn without_matrices_there_are_no_products_of_halves() {
    let Some(vulkan) = opened(Options { matrices: false, ..options() }) else { return };
    let (of_halves, others): (Vec<_>, Vec<_>) =
        Kernel::all().into_iter().filter(|kernel| !kernel.name.is_for_bricks()).partition(|k| k.name.is_for_halves());
    assert!(!of_halves.iter().any(|&kernel| vulkan.has(kernel)) && others.iter().all(|&kernel| vulkan.has(kernel)));
    assert_eq!(of_halves.len(), 25);
}

#[test]
fn sets_of_descriptors_change_no_kernel() {
    let Some(vulkan) = opened(Options { push_descriptors: false, ..options() }) else { return };
    every_kernel(&Gpu::new(vulkan, None), Extent::Small);
}

#[test]
fn faults_on_purpose_are_noticed_and_formats_refused() {
    let Some(vulkan) = opened(options()) else { return };
    formats_are_refused(&Gpu::new(vulkan, None));
    faults_on_purpose(|| opened(options()).unwrap());
}

#[test]
fn experts_in_tiers() {
    let Some(_) = opened(options()) else { return };
    tiers::tests::same_bits(|| opened(options()).unwrap());
    tiers::tests::batches(|| opened(options()).unwrap());
    tiers::tests::too_little(|| opened(options()).unwrap());
}

#[test]
fn memory_that_is_not_there_is_named_and_comes_back() {
    let Some(vulkan) = opened(Options { memory_bytes: 100 << 20, ..options() }) else { return };
    assert_eq!(vulkan.memory().unwrap(), DeviceMemory { free: 100 << 20, total: 100 << 20 });
    let first = vulkan.allocate(60 << 20, "the first").unwrap();
    vulkan.write(&first, 0, &[1; 4096]).unwrap();
    let message = said(vulkan.allocate(60 << 20, "the second"));
    let device = vulkan.device();
    assert_eq!(
        message,
        format!("{device}: no memory for the second: 62914560 bytes are wanted, 41943040 of 104857600 are free")
    );
    drop(first);
    let second = vulkan.allocate(90 << 20, "the second").unwrap();
    drop(second);
    vulkan.allocate(100 << 20, "all").unwrap();
    // Where a block of the usual size is not to be had, one of what is wanted may be.
    let Some(vulkan) = opened(options()) else { return };
    failing(&vulkan, "vkAllocateMemory", vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
    let one = vulkan.allocate(4 << 20, "one").unwrap();
    failing(&vulkan, "vkBindBufferMemory", vk::Result::ERROR_UNKNOWN);
    let message = said(vulkan.allocate(1 << 20, "two"));
    assert!(message.contains("cannot make a buffer of "), "{message}");
    assert!(message.ends_with(" bytes for two: vkBindBufferMemory says VK_ERROR_UNKNOWN"), "{message}");
    drop(one);
}

#[test]
fn a_device_that_is_lost_is_named_with_what_it_did() {
    let Some(vulkan) = opened(options()) else { return };
    let (x, y) = (vulkan.allocate(256, "x").unwrap(), vulkan.allocate(256, "y").unwrap());
    let zeros = [0; 256];
    vulkan.write(&x, 0, &zeros).unwrap();
    vulkan.write(&y, 0, &zeros).unwrap();
    failing(&vulkan, "vkQueueSubmit", vk::Result::ERROR_DEVICE_LOST);
    let expected = format!("{}: cannot run add: vkQueueSubmit says VK_ERROR_DEVICE_LOST", vulkan.device());
    let message = said(add(&vulkan, &x, &y, 64).and_then(|()| vulkan.wait()));
    assert_eq!(message, expected);
    // It stays lost.
    assert_eq!(said(vulkan.write(&x, 0, &zeros)), expected);
    assert_eq!(said(vulkan.read(&x, 0, &mut [0; 4])), expected);
    assert_eq!(said(add(&vulkan, &x, &y, 64)), expected);

    let Some(vulkan) = opened(options()) else { return };
    let (x, y) = (vulkan.allocate(256, "x").unwrap(), vulkan.allocate(256, "y").unwrap());
    for _ in 0..4 {
        add(&vulkan, &x, &y, 64).unwrap();
    }
    failing(&vulkan, "vkWaitForFences", vk::Result::ERROR_DEVICE_LOST);
    let message = said(vulkan.wait());
    assert!(
        message.contains(": cannot run ") && message.ends_with("vkWaitForFences says VK_ERROR_DEVICE_LOST"),
        "{message}"
    );
    assert_eq!(said(vulkan.wait()), message);
}

#[test]
fn a_kernel_that_does_not_end_is_given_up() {
    let Some(vulkan) = opened(Options { patience: Duration::ZERO, ..options() }) else { return };
    let count = 16 << 20;
    let (x, y) = (vulkan.allocate(4 * count, "x").unwrap(), vulkan.allocate(4 * count, "y").unwrap());
    let message = said(add(&vulkan, &x, &y, count as u32).and_then(|()| vulkan.wait()));
    assert_eq!(message, format!("{}: cannot run add within 0 s", vulkan.device()));
    assert_eq!(said(vulkan.wait()), message);
    // What the device may still use stays; the library too, for the time that it takes.
    drop((x, y));
    drop(vulkan);
    std::thread::sleep(Duration::from_secs(1));
}

#[test]
fn what_fails_while_a_device_is_opened_or_a_kernel_made_is_named() {
    let Some(vulkan) = opened(options()) else { return };
    let (x, y) = (vulkan.allocate(256, "x").unwrap(), vulkan.allocate(256, "y").unwrap());
    failing(&vulkan, "vkCreateComputePipelines", vk::Result::ERROR_OUT_OF_HOST_MEMORY);
    let message = said(add(&vulkan, &x, &y, 64));
    let expected = "cannot make add ready: vkCreateComputePipelines says VK_ERROR_OUT_OF_HOST_MEMORY";
    assert!(message.ends_with(expected), "{message}");
    add(&vulkan, &x, &y, 64).unwrap();
    vulkan.wait().unwrap();
    let found = list().unwrap().len();
    let message = said(Vulkan::open(Options { ordinal: 100, ..options() }));
    assert!(
        message.starts_with("there is no device vulkan:100: ") && message.contains(&found.to_string()),
        "{message}"
    );
}

#[test]
fn what_the_validation_layers_say_is_a_fault() {
    let Some(vulkan) = opened(options()) else { return };
    if !options().validation {
        eprintln!("not tested: COLICONV_VULKAN_VALIDATION is not 1");
        return;
    }
    let buffer = vulkan.allocate(256, "x").unwrap();
    vulkan.write(&buffer, 0, &[0; 4]).unwrap();
    let info = vk::BufferCreateInfo::default().size(0).usage(vk::BufferUsageFlags::STORAGE_BUFFER);
    // SAFETY: no memory is behind it; that it has no bytes is what the layers are to find.
    if let Ok(wrong) = unsafe { vulkan.0.core.device.create_buffer(&info, None) } {
        // SAFETY: nothing uses it.
        unsafe { vulkan.0.core.device.destroy_buffer(wrong, None) };
    }
    let message = said(vulkan.write(&buffer, 0, &[0; 4]));
    assert!(
        message.contains("the validation layers say: ") && message.contains("VUID-VkBufferCreateInfo-size"),
        "{message}"
    );
    vulkan.write(&buffer, 0, &[0; 4]).unwrap();
}

#[test]
fn devices_are_listed() {
    let Some(vulkan) = opened(options()) else { return };
    let adapters = list().unwrap();
    assert!(adapters.iter().enumerate().all(|(at, adapter)| adapter.ordinal == at));
    assert!(adapters.is_sorted_by_key(|adapter| adapter.kind));
    assert_eq!(adapters[0].name, vulkan.device());
    assert!(adapters[0].name.contains("(vulkan:0, "), "{}", adapters[0].name);
    assert!(adapters[0].memory_bytes > 0 && adapters[0].missing.is_none());
    let limits = vulkan.limits();
    assert!(limits.buffer_bytes >= 128 << 20 && limits.groups.iter().all(|&most| most >= 65_535), "{limits:?}");
}
