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
    "router_logits",
    "choose",
    "group_rows",
    "combine",
    "combine_onto",
    "rms_norm",
    "add_norm",
    "layer_norm",
    "rope",
    "keep",
    "copy_rows",
    "take_rows",
    "add",
    "swiglu",
    "predict",
    "predict_merge",
    "read",
    "fma_peak",
    "round_halves",
    "matmul_halves_int8_row",
    "matmul_halves_int4_row",
    "matmul_halves_int4_grouped",
    "matmul_halves_int3_g64",
    "matmul_halves_int2_row",
    "matmul_halves_fp8_e4m3_b128",
    "experts_halves_int8_row",
    "experts_halves_int4_row",
    "experts_halves_int4_grouped",
    "experts_halves_int3_g64",
    "experts_halves_int2_row",
    "experts_halves_fp8_e4m3_b128",
    "matmul_f32_subgroup",
    "matmul_int8_row_subgroup",
    "matmul_int4_row_subgroup",
    "matmul_int4_grouped_subgroup",
    "matmul_int3_g64_subgroup",
    "matmul_int2_row_subgroup",
    "matmul_fp8_e4m3_b128_subgroup",
    "experts_f32_subgroup",
    "experts_int8_row_subgroup",
    "experts_int4_row_subgroup",
    "experts_int4_grouped_subgroup",
    "experts_int3_g64_subgroup",
    "experts_int2_row_subgroup",
    "experts_fp8_e4m3_b128_subgroup",
    "attend_subgroup",
    "router_logits_subgroup",
    "rms_norm_subgroup",
    "add_norm_subgroup",
    "layer_norm_subgroup",
    "keep_subgroup",
];

/// The code of a kernel, with sums by subgroups if it has any and they are asked for; `None` if there is none.
pub(super) fn of(kernel: Kernel, subgroups: bool) -> Option<&'static [u8]> {
    let name = Kernel { rows: None, ..kernel }.function();
    let code = |name: &str| CODE.iter().find(|(of, _)| *of == name).map(|&(_, code)| code);
    let by_subgroups = if subgroups { code(&format!("{name}_subgroup")) } else { None };
    by_subgroups.or_else(|| code(&name))
}

/// The bindings that a module may write to, a bit each: those of its storage buffers that are not said to be read alone.
///
/// SPIR-V 1.3, sections 2.3 and 3.32: an instruction's first word has the number of its words above its code.
pub(super) fn written(code: &[u8]) -> u32 {
    const TYPE_POINTER: u32 = 32;
    const VARIABLE: u32 = 59;
    const DECORATE: u32 = 71;
    const MEMBER_DECORATE: u32 = 72;
    const NON_WRITABLE: u32 = 24;
    const BINDING: u32 = 33;
    let words: Vec<u32> = code.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
    let (mut read_alone, mut bindings, mut pointed, mut written) = (Vec::new(), Vec::new(), Vec::new(), 0);
    let mut left = words.get(5..).unwrap_or_default();
    while let Some(&first) = left.first() {
        let (instruction, rest) = left.split_at(((first >> 16) as usize).clamp(1, left.len()));
        left = rest;
        match (first & 0xffff, &instruction[1..]) {
            (DECORATE, &[variable, BINDING, binding]) => bindings.push((variable, binding)),
            (MEMBER_DECORATE, &[block, _, NON_WRITABLE]) => read_alone.push(block),
            (TYPE_POINTER, &[pointer, _, to]) => pointed.push((pointer, to)),
            (VARIABLE, &[pointer, variable, ..]) => {
                let block = pointed.iter().find(|(of, _)| *of == pointer).map(|&(_, to)| to);
                let binding = bindings.iter().find(|(of, _)| *of == variable).map(|&(_, binding)| binding);
                if let Some(binding) = binding.filter(|_| block.is_none_or(|block| !read_alone.contains(&block))) {
                    written |= 1 << binding;
                }
            }
            _ => {}
        }
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever changes a source has to build its code anew, too.
    #[test]
    fn code_is_that_of_the_sources_beside_it() {
        use sha2::{Digest, Sha256};
        let spv = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/vulkan/spv");
        let sums = std::fs::read_to_string(spv.join("SHA256SUMS")).unwrap();
        let hash = |bytes: &[u8]| Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let mut named = Vec::new();
        for line in sums.lines() {
            let (sum, name) = line.split_once("  ").unwrap();
            assert_eq!(hash(&std::fs::read(spv.join(name)).unwrap()), sum, "{name}: see docs/vulkan.md, building");
            named.push(name.trim_start_matches("../").to_owned());
        }
        for (name, code) in CODE {
            assert!(sums.contains(&format!("{}  {name}.spv\n", hash(code))), "{name}");
        }
        let kernels = std::fs::read_dir(spv.join("..")).unwrap().chain(std::fs::read_dir(&spv).unwrap());
        let files = kernels.map(|entry| entry.unwrap()).filter(|entry| entry.path().is_file());
        for name in files.map(|entry| entry.file_name().to_string_lossy().into_owned()) {
            assert!(name == "SHA256SUMS" || named.contains(&name), "{name} is not in SHA256SUMS");
        }
    }

    /// The code itself tells which buffers a kernel writes to: what it says is held against the kernels' own list, and by hand.
    #[test]
    fn kernels_write_to_what_they_are_said_to() {
        let mask = |name: &str| CODE.iter().find(|(of, _)| *of == name).map(|(_, code)| written(code)).unwrap();
        assert_eq!(["matmul_f32", "experts_int3_g64_subgroup", "absorb_int8_row", "embed_f32"].map(mask), [8; 4]);
        assert_eq!(["rope", "add", "fma_peak"].map(mask), [1; 3]);
        assert_eq!(["copy_rows", "group_rows", "read", "round_halves"].map(mask), [2; 4]);
        assert_eq!(["matmul_halves_int4_row", "experts_halves_int3_g64"].map(mask), [8; 2]);
        assert_eq!(["choose", "top_positions", "merge", "index_scores", "predict"].map(mask), [28, 4, 4, 16, 2]);
        assert_eq!(["keep", "add_norm", "combine_onto", "predict_merge"].map(mask), [17, 9, 8, 8]);
        for kernel in Kernel::all().into_iter().filter(|kernel| !kernel.name.is_for_bricks()) {
            for subgroups in [false, true] {
                let mask = written(of(kernel, subgroups).unwrap());
                assert!(mask != 0 && mask >> kernel.name.buffers() == 0, "{} writes {mask:#b}", kernel.function());
                let output = kernel.name.output().unwrap_or(mask.trailing_zeros() as usize);
                assert!(mask >> output & 1 == 1, "{} writes {mask:#b}, not {output}", kernel.function());
            }
        }
        assert_eq!(written(&[]), 0);
    }

    #[test]
    fn every_kernel_has_code_and_none_is_left_over() {
        let mut used: Vec<String> = Vec::new();
        for kernel in Kernel::all().into_iter().filter(|kernel| !kernel.name.is_for_bricks()) {
            let code = of(kernel, false).unwrap_or_else(|| panic!("no code of {}", kernel.function()));
            assert_eq!(code[..4], [0x03, 0x02, 0x23, 0x07], "{} is no SPIR-V", kernel.function());
            assert_eq!(code.len() % 4, 0, "{}", kernel.function());
            let name = Kernel { rows: None, ..kernel }.function();
            if of(kernel, true) != Some(code) {
                used.push(format!("{name}_subgroup"));
            }
            used.push(name);
        }
        for (name, _) in CODE {
            assert!(used.iter().any(|used| used == name), "no kernel is {name}");
        }
    }
}
