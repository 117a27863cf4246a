//! The code of the kernels, as it was built from `kernels/vulkan/*.comp`.

use crate::backend::gpu::kernels::Kernel;

macro_rules! code {
    [$($name:literal,)*] => {
        [$(($name, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/vulkan/spv/", $name, ".spv")))),*]
    };
}

/// Name and SPIR-V of each kernel; the rows of a tile are a constant of it.
const CODE: &[(&str, &[u8])] = &code![
    "matmul_f32",
    "matmul_int8_row",
    "matmul_int4_row",
    "matmul_int4_grouped",
    "matmul_int3_g64",
    "matmul_int2_row",
    "matmul_fp8_e4m3_b128",
    "experts_f32",
    "experts_int8_row",
    "experts_int4_row",
    "experts_int4_grouped",
    "experts_int3_g64",
    "experts_int2_row",
    "experts_fp8_e4m3_b128",
    "embed_f32",
    "embed_int8_row",
    "embed_int4_row",
    "embed_int4_grouped",
    "embed_int3_g64",
    "embed_int2_row",
    "embed_fp8_e4m3_b128",
    "absorb_f32",
    "absorb_int8_row",
    "absorb_int4_row",
    "absorb_int4_grouped",
    "absorb_int3_g64",
    "absorb_int2_row",
    "absorb_fp8_e4m3_b128",
    "attend",
    "merge",
    "index_scores",
    "top_positions",
    "choose",
    "group_rows",
    "combine",
    "rms_norm",
    "layer_norm",
    "rope",
    "copy_rows",
    "take_rows",
    "add",
    "swiglu",
    "predict",
];

/// The code of a kernel; `None` if there is none.
pub(super) fn of(kernel: Kernel) -> Option<&'static [u8]> {
    let name = Kernel { rows: None, ..kernel }.function();
    CODE.iter().find(|(of, _)| *of == name).map(|&(_, code)| code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_code_and_none_is_left_over() {
        let mut used: Vec<String> = Vec::new();
        for kernel in Kernel::all() {
            let code = of(kernel).unwrap_or_else(|| panic!("no code of {}", kernel.function()));
            assert_eq!(code[..4], [0x03, 0x02, 0x23, 0x07], "{} is no SPIR-V", kernel.function());
            assert_eq!(code.len() % 4, 0, "{}", kernel.function());
            used.push(Kernel { rows: None, ..kernel }.function());
        }
        for (name, _) in CODE {
            assert!(used.iter().any(|used| used == name), "no kernel is {name}");
        }
    }
}
