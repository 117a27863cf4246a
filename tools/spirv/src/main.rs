//! Builds `kernels/vulkan/spv` from `kernels/vulkan/*.comp`, or checks that it is what they give:
//!
//!     cargo run --release --manifest-path tools/spirv/Cargo.toml [check]
//!
//! - A source that names `KERNEL_…` holds these kernels, any other the one of its own name.
//! - A source comes once for each coding of weights that it names, as `CODING_…`: all where it includes `weights.glsl`, those
//!   that are halves where it includes `half_weights.glsl`.
//! - A kernel that adds up lanes, by `sums.glsl`, comes once more, with subgroups.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use glslang::{
    Compiler, CompilerOptions, ShaderInput, ShaderSource, ShaderStage, SourceLanguage, SpirvVersion, Target,
    VulkanVersion,
};
use sha2::{Digest, Sha256};

const CODINGS: [&str; 7] = ["f32", "int8_row", "int4_row", "int4_grouped", "int3_g64", "int2_row", "fp8_e4m3_b128"];

fn main() -> ExitCode {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/vulkan");
    let check = match std::env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [] => false,
        [word] if word == "check" => true,
        _ => {
            eprintln!("usage: spirv [check]");
            return ExitCode::from(2);
        }
    };
    match build(&kernels).and_then(|files| if check { compare(&kernels, &files) } else { write(&kernels, &files) }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Every file of `spv` with what is to be in it.
fn build(kernels: &Path) -> Result<BTreeMap<String, Vec<u8>>, String> {
    let mut files = BTreeMap::new();
    for path in sorted(kernels)?.into_iter().filter(|path| path.extension().is_some_and(|of| of == "comp")) {
        let text = expanded(kernels, &path, &mut Vec::new())?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        for kernel in kernels_of(&text, &stem) {
            let define = format!("#define KERNEL_{}\n", kernel.to_uppercase());
            let named = |coding: &&str| text.contains(&format!("CODING_{}", coding.to_uppercase()));
            let mut codings: Vec<Option<&str>> = CODINGS.iter().copied().filter(named).map(Some).collect();
            if codings.is_empty() {
                codings.push(None);
            }
            for coding in codings {
                let (name, defines) = match coding {
                    None => (kernel.clone(), define.clone()),
                    Some(coding) => {
                        (format!("{kernel}_{coding}"), format!("{define}#define CODING_{}\n", coding.to_uppercase()))
                    }
                };
                let (code, sums) = compile(&name, &text, &defines)?;
                files.insert(format!("{name}.spv"), code);
                if sums {
                    let (code, _) = compile(&name, &text, &format!("{defines}#define SUBGROUPS\n"))?;
                    files.insert(format!("{name}_subgroup.spv"), code);
                }
            }
        }
    }
    let mut sums = String::new();
    for path in sorted(kernels)?.into_iter().filter(|path| path.is_file()) {
        let bytes = std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        sums += &format!("{}  ../{name}\n", hex(&Sha256::digest(bytes)));
    }
    for (name, bytes) in &files {
        sums += &format!("{}  {name}\n", hex(&Sha256::digest(bytes)));
    }
    files.insert("SHA256SUMS".to_owned(), sums.into_bytes());
    Ok(files)
}

/// The kernels of a source, in the order of their names.
fn kernels_of(text: &str, stem: &str) -> Vec<String> {
    let is_part = |c: char| c.is_ascii_uppercase() || c == '_';
    let mut names: Vec<String> = text
        .split("KERNEL_")
        .skip(1)
        .map(|rest| rest.chars().take_while(|&c| is_part(c)).collect::<String>().to_lowercase())
        .collect();
    names.sort();
    names.dedup();
    if names.is_empty() { vec![stem.to_owned()] } else { names }
}

/// A source with what it includes, each file once.
fn expanded(folder: &Path, path: &Path, seen: &mut Vec<PathBuf>) -> Result<String, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut out = String::new();
    for line in text.lines() {
        match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
            Some(name) => {
                let included = folder.join(name);
                if !seen.contains(&included) {
                    seen.push(included.clone());
                    out += &expanded(folder, &included, seen)?;
                }
            }
            None => {
                out += line;
                out.push('\n');
            }
        }
    }
    Ok(out)
}

/// The code of a kernel, and whether it adds up lanes.
fn compile(name: &str, text: &str, defines: &str) -> Result<(Vec<u8>, bool), String> {
    let told = |error: String| format!("{name}: {error}");
    let at = text.find("#version 450\n").ok_or_else(|| told("no #version 450".to_owned()))? + "#version 450\n".len();
    let source = ShaderSource::from(format!("{}{defines}{}", &text[..at], &text[at..]));
    let options = CompilerOptions {
        source_language: SourceLanguage::GLSL,
        target: Target::Vulkan { version: VulkanVersion::Vulkan1_1, spirv_version: SpirvVersion::SPIRV1_3 },
        version_profile: None,
        ..CompilerOptions::default()
    };
    let compiler = Compiler::acquire().ok_or_else(|| told("glslang does not start".to_owned()))?;
    let input = ShaderInput::new(&source, ShaderStage::Compute, &options, None, None)
        .map_err(|error| told(format!("{error}")))?;
    let shader = compiler.create_shader(input).map_err(|error| told(format!("{error}")))?;
    let sums = shader.get_preprocessed_code().contains("lanes_of");
    let words = shader.compile().map_err(|error| told(format!("{error}")))?;
    Ok((words.iter().flat_map(|word| word.to_le_bytes()).collect(), sums))
}

fn write(kernels: &Path, files: &BTreeMap<String, Vec<u8>>) -> Result<(), String> {
    let spv = kernels.join("spv");
    std::fs::create_dir_all(&spv).map_err(|error| format!("{}: {error}", spv.display()))?;
    for path in sorted(&spv)? {
        let known = path.file_name().is_some_and(|name| files.contains_key(&*name.to_string_lossy()));
        if !known {
            std::fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
    }
    for (name, bytes) in files {
        let path = spv.join(name);
        std::fs::write(&path, bytes).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    println!("{} kernels, {} bytes", files.len() - 1, files.values().map(Vec::len).sum::<usize>());
    Ok(())
}

/// Says what of `spv` is not what its sources give.
fn compare(kernels: &Path, files: &BTreeMap<String, Vec<u8>>) -> Result<(), String> {
    let spv = kernels.join("spv");
    let mut wrong: Vec<String> = Vec::new();
    for (name, bytes) in files {
        match std::fs::read(spv.join(name)) {
            Ok(found) if found == *bytes => {}
            Ok(_) => wrong.push(format!("{name} differs")),
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
    }
    for path in sorted(&spv)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !files.contains_key(&name) {
            wrong.push(format!("{name} has no source"));
        }
    }
    if wrong.is_empty() {
        println!("{} kernels are what their sources give", files.len() - 1);
        return Ok(());
    }
    Err(format!("kernels/vulkan/spv is not what its sources give: {}", wrong.join(", ")))
}

fn sorted(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let told = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(told)? {
        paths.push(entry.map_err(told)?.path());
    }
    paths.sort();
    Ok(paths)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
