//! NVIDIA's driver emulated on the CPU, with the kernels of `kernels/cuda` in it: tests/cuda.
//!
//! The library is made once for the sources that it is of, with the system's C++ compiler, into `target/emulated-cuda`.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// What both the kernels and the emulation are compiled with. Nothing is fused but by fmaf, as on the GPU; words that are not
/// aligned and indices outside of an array stop the kernel.
const FLAGS: [&str; 13] = [
    "-std=c++17",
    "-O2",
    "-march=native",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-fsanitize=alignment,bounds",
    "-fsanitize-undefined-trap-on-error",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-DCOLICONV_EMULATED",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files of a folder whose names end so, sorted.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries.filter(|path| path.to_str().unwrap().ends_with(ending)).collect();
    files.sort();
    files
}

fn compiler() -> Command {
    let mut command = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned()));
    command.args(FLAGS).arg("-I").arg(root().join("kernels/cuda")).arg("-I").arg(root().join("tests/cuda"));
    command
}

/// Runs a command to its good end; gives what it prints.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Kernels of a source file with their threads, as the preprocessor finds them.
pub fn kernels(source: &Path) -> Vec<(u32, String)> {
    let text = run(compiler().args(["-DCOLICONV_LISTING", "-E", "-P", "-x", "c++"]).arg(source));
    let mut words = text.split_whitespace();
    let mut found = Vec::new();
    while let Some(word) = words.next() {
        if word == "emulated_kernel" {
            let threads = words.next().unwrap().parse().unwrap();
            found.push((threads, words.next().unwrap().trim_end_matches(';').to_owned()));
        }
    }
    found
}

/// Compiles C++ text to an object file, in a process of its own.
fn compile(folder: &Path, name: &str, text: &str, flags: &[&str]) -> (std::process::Child, PathBuf) {
    let (source, object) = (folder.join(format!("{name}.cpp")), folder.join(format!("{name}.o")));
    fs::write(&source, text).unwrap();
    let child = compiler().args(flags).arg("-c").arg(&source).arg("-o").arg(&object).spawn().unwrap();
    (child, object)
}

/// The folder of an emulated driver of that kind; `flags` differ for each.
fn made(kind: &str, flags: &[&str], sources: &[PathBuf]) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (FLAGS, flags, kind).hash(&mut hasher);
    // Instructions are those of this CPU.
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpu.lines().find(|line| line.starts_with("flags")).hash(&mut hasher);
    for ending in [".cu", ".cuh"] {
        files(&root().join("kernels/cuda"), ending).iter().for_each(|path| fs::read(path).unwrap().hash(&mut hasher));
    }
    for ending in [".cpp", ".h"] {
        files(&root().join("tests/cuda"), ending).iter().for_each(|path| fs::read(path).unwrap().hash(&mut hasher));
    }
    let all = root().join("target/emulated-cuda");
    let folder = all.join(format!("{kind}-{:016x}", hasher.finish()));
    if folder.exists() {
        return folder;
    }
    fs::create_dir_all(&all).unwrap();
    let work = tempfile::tempdir_in(&all).unwrap();
    let include = |path: &PathBuf| format!("#include {path:?}\n");
    let mut objects = Vec::new();
    for name in ["driver", "emulated"] {
        let path = root().join("tests/cuda").join(format!("{name}.cpp"));
        objects.push(compile(work.path(), name, &include(&path), flags));
    }
    for source in sources {
        let registered: String =
            kernels(source).iter().map(|(threads, name)| format!("EMULATED_REGISTER({threads}, {name})\n")).collect();
        assert!(!registered.is_empty(), "{source:?} declares no kernel");
        // Names of one file are not those of another.
        let text = format!("#include \"emulated.h\"\nnamespace {{\n{}{registered}}}\n", include(source));
        objects.push(compile(work.path(), source.file_stem().unwrap().to_str().unwrap(), &text, flags));
    }
    // The first name under which the library is looked for, by which it is also known when it is loaded already.
    let mut link = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned()));
    link.args(["-shared", "-Wl,-soname,libcuda.so", "-Wl,-z,defs", "-o"]).arg(work.path().join("libcuda.so"));
    for (mut child, object) in objects {
        assert!(child.wait().unwrap().success(), "{object:?} was not made");
        link.arg(object);
    }
    run(link.arg("-lpthread"));
    std::os::unix::fs::symlink("libcuda.so", work.path().join("libcuda.so.1")).unwrap();
    // Whole or not at all, whoever else makes it at the same time.
    let made = work.keep();
    if fs::rename(&made, &folder).is_err() {
        fs::remove_dir_all(&made).unwrap();
    }
    assert!(folder.exists());
    folder
}

/// The folder of the emulated driver, for LD_LIBRARY_PATH.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| made("whole", &[], &files(&root().join("kernels/cuda"), ".cu")))
}

/// One that lacks `cuEventRecord`, as a driver that is too old lacks some function.
pub fn without_a_function() -> PathBuf {
    made("without", &["-DCOLICONV_WITHOUT"], &[])
}

/// One with kernels that do what they must not.
pub fn with_wrong_kernels() -> PathBuf {
    made("wrong", &[], &[root().join("tests/cuda/wrong.cu")])
}

/// `coliconv` with the driver of a folder and nothing else of the kind; `settings` are variables of tests/cuda/driver.cpp.
pub fn coliconv(folder: &Path, settings: &[(&str, &str)]) -> assert_cmd::Command {
    let mut command = assert_cmd::Command::cargo_bin("coliconv").unwrap();
    command.env("LD_LIBRARY_PATH", folder).envs(settings.iter().copied());
    command
}
