//! What needs an NVIDIA GPU: run on a machine that has one, `cargo test --lib cuda::on_gpu -- --ignored`.

use super::images::Prefer;
use super::*;
use crate::backend::Mode;
use crate::backend::gpu::Gpu;
use crate::backend::gpu::tests::{
    Extent, every_kernel, fast_products, faults_on_purpose, formats_are_refused, same_with_wgmma,
};

fn gpu(prefer: Prefer) -> Gpu<Cuda> {
    Gpu::new(Cuda::open_with(0, prefer).unwrap(), None)
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_kernel_is_that_of_the_reference() {
    every_kernel(&gpu(Prefer::default()), Extent::Glm);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn fast_products_are_near() {
    fast_products(&gpu(Prefer::default()).in_mode(Mode::Fast));
}

/// Compares on compute capability 9.0 alone: no other has wgmma, which is said.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn wgmma_computes_the_same() {
    let capability = Cuda::open(0).unwrap().0.description().capability();
    if capability != "9.0" {
        eprintln!("not tested: wgmma needs compute capability 9.0, the device has {capability}");
        return;
    }
    for mode in [Mode::Exact, Mode::Fast] {
        let [with, without] = [Prefer::Cubin, Prefer::Ptx].map(|prefer| gpu(prefer).in_mode(mode));
        same_with_wgmma(&with, &without, Extent::Glm);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn ptx_computes_the_same() {
    every_kernel(&gpu(Prefer::Ptx), Extent::Small);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn faults_are_noticed() {
    faults_on_purpose(|| Cuda::open(0).unwrap());
    formats_are_refused(&gpu(Prefer::default()));
}
