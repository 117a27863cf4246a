#!/usr/bin/env python3
"""Compiles the kernels of this folder, without a GPU and without a toolkit.

    python3 kernels/cuda/build.py            writes images/ and SHA256SUMS
    python3 kernels/cuda/build.py --check    builds all anew elsewhere and compares; fails on any difference

For every .cu file: machine code (cubin) of each of ARCHITECTURES by NVRTC 12.8, and PTX of compute_75 by NVRTC 12.2, which
drivers since CUDA 12.2 take, for GPUs that none of the cubins runs on. The PTX is assembled for every architecture, too. Files with
instructions of one architecture alone are compiled for it and have no PTX.
Warnings are errors, and so are spilled registers and stack frames but for a few bytes in
kernels for tensor cores. NVRTC and ptxas come from PyPI, by version and hash
(requirements-*.txt), into target/cuda.
"""

import argparse
import ctypes
import hashlib
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parent.parent / "target" / "cuda"
ARCHITECTURES = [75, 80, 86, 89, 90, 100, 120]
PTX_ARCHITECTURE = 75
# Files for tensor cores that multiply bf16, which devices before 8.0 do not have.
TENSOR_FILES, TENSOR_ARCHITECTURE = ["ranges", "stream", "stream_experts", "tile", "tile_experts"], 80
# Of these, those that want more shared memory than other architectures have.
TILE_FILES, TILE_ARCHITECTURES = ["tile", "tile_experts"], [80, 90, 100]
# Those with instructions that one architecture has and no other, later ones included.
ONLY_FILES, ONLY_ARCHITECTURE = ["wide", "wide_experts"], 90
# Bytes that kernels for tensor cores may spill: registers are capped, and what is kept from one piece of work to the next may go to memory.
TENSOR_SPILLS = 512
# What the PTX is assembled for: all that ptxas 12.8 knows from 7.5 on.
ASSEMBLED = [75, 80, 86, 87, 89, 90, 100, 101, 120]
# No contraction: a product is fused with a sum where the source says fmaf. The libraries of the language are not wanted.
OPTIONS = ["--std=c++17", "--fmad=false", "--ptxas-options=-v", "--display-error-number"]


class Failed(Exception):
    """What is told instead of a result."""


def installed(requirements: str) -> Path:
    """The folder of the wheels of a requirements file; installed where it is missing or of another list."""
    listed = (HERE / requirements).read_bytes()
    folder = TOOLS / hashlib.sha256(listed).hexdigest()[:16]
    if not (folder / "complete").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-warn-script-location", "--root-user-action=ignore", "--upgrade", "--only-binary=:all:"]
        command += ["--require-hashes", "--target", str(folder), "-r", str(HERE / requirements)]
        subprocess.run(command, check=True)
        (folder / "complete").touch()
    return folder


class Nvrtc:
    """NVIDIA's compiler of CUDA C++ as a library."""

    def __init__(self, wheels: Path):
        folder = wheels / "nvidia" / "cuda_nvrtc" / "lib"
        # The library looks for its built-ins by name: they are there when they are loaded already.
        for builtins in sorted(folder.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_LOCAL)
        self.library = ctypes.CDLL(str(folder / "libnvrtc.so.12"), mode=ctypes.RTLD_LOCAL)
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise Failed(f"{name}: {self.library.nvrtcGetErrorString(code).decode()}")

    def bytes_of(self, program, what: str) -> bytes:
        """The result `what` of a program: Log, PTX (with its 0 taken off) or CUBIN."""
        size = ctypes.c_size_t()
        sized = "nvrtcGetProgramLogSize" if what == "ProgramLog" else f"nvrtcGet{what}Size"
        self.call(sized, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw if what == "CUBIN" else buffer.raw.rstrip(b"\0")

    def compiled(self, file: Path, architecture: str) -> tuple[bytes, str]:
        """A file as machine code (sm_…) or PTX (compute_…), and what the compiler says."""
        # Headers are given with the source: no path is ever in the result.
        headers = sorted(HERE.glob("*.cuh"))
        texts = (ctypes.c_char_p * len(headers))(*(header.read_bytes() for header in headers))
        names = (ctypes.c_char_p * len(headers))(*(header.name.encode() for header in headers))
        program = ctypes.c_void_p()
        source, name = file.read_bytes(), file.name.encode()
        self.call("nvrtcCreateProgram", ctypes.byref(program), source, name, len(headers), texts, names)
        options = [option.encode() for option in [f"--gpu-architecture={architecture}", *OPTIONS]]
        try:
            code = self.library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
            log = self.bytes_of(program, "ProgramLog").decode()
            if code != 0:
                raise Failed(f"{file.name} for {architecture}: {self.library.nvrtcGetErrorString(code).decode()}\n{log}")
            return self.bytes_of(program, "CUBIN" if architecture.startswith("sm_") else "PTX"), log
        finally:
            self.call("nvrtcDestroyProgram", ctypes.byref(program))


def resources(log: str, what: str) -> dict[str, dict[str, int]]:
    """Registers, shared memory, stack and spills of each kernel, from what ptxas says. Anything else it says is an error."""
    found, kernel = {}, None
    for line in log.splitlines():
        line = line.strip()
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = found.setdefault(match[1], {})
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            kernel["stack"], kernel["spills"] = int(match[1]), int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            kernel["registers"] = int(match[1])
            shared = re.search(r"(\d+) bytes smem", line)
            kernel["shared"] = int(shared[1]) if shared else 0
        elif line and not re.search(r"bytes gmem|Function properties for|Compile time =", line):
            raise Failed(f"{what}: {line}")
    return found


def assembled(ptxas: Path, ptx: bytes, architecture: int, what: str) -> dict[str, dict[str, int]]:
    """Assembles PTX, for what ptxas says of it."""
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(ptxas), "-v", f"--gpu-name=sm_{architecture}", "-o", "/dev/null", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"{what}: {done.stderr}")
    return resources(done.stdout + done.stderr, what)


def entries(ptx: bytes) -> list[str]:
    """Names of kernels in PTX."""
    return sorted(re.findall(r"^\.visible \.entry (\w+)\(", ptx.decode(), re.MULTILINE))


# The compilers of this process, by their requirements: of each version one library in a process, with symbols of its own.
COMPILERS: dict[str, Nvrtc] = {}


def compiled(file: Path, architecture: str) -> tuple[bytes, str]:
    """A file as machine code (sm_…) or PTX (compute_…), and what the compiler says, in whichever process this is."""
    requirements = "requirements-cubin.txt" if architecture.startswith("sm_") else "requirements-ptx.txt"
    if requirements not in COMPILERS:
        COMPILERS[requirements] = Nvrtc(installed(requirements))
    return COMPILERS[requirements].compiled(file, architecture)


def build(into: Path, verbose: bool) -> list[tuple[str, dict[str, dict[str, dict[str, int]]]]]:
    """Makes all images; returns what each file's kernels use, by kernel and architecture."""
    tools, _ = installed("requirements-cubin.txt"), installed("requirements-ptx.txt")
    ptxas = tools / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
    ptxas.chmod(0o755)
    files = sorted(HERE.glob("*.cu"))
    # Every compilation in a process of its own kind: the longest first.
    with ProcessPoolExecutor() as pool:
        first = sorted(files, key=lambda file: -file.stem.count("stream") - file.stem.count("tile"))
        general = [file for file in first if file.stem not in ONLY_FILES]
        texts = {file: pool.submit(compiled, file, f"compute_{oldest_of(file)}") for file in general}
        images = {
            (file, architecture): pool.submit(compiled, file, f"sm_{architecture}{'' if file in general else 'a'}")
            for file in first
            for architecture in architectures_of(file)
        }
        checks = {}
        for file in general:
            text, log = texts[file].result()
            if log.strip():
                raise Failed(f"{file.name} as PTX: {log}")
            for architecture in [architecture for architecture in ASSEMBLED if architecture >= oldest_of(file)]:
                what = f"{file.name}, PTX for sm_{architecture}"
                checks[file, architecture] = pool.submit(assembled, ptxas, text, architecture, what)
        used = [collected(into, file, texts, images, checks, verbose) for file in files]
    write_table(into, files, used)
    return used


def oldest_of(file: Path) -> int:
    """The oldest architecture that a file is for."""
    return TENSOR_ARCHITECTURE if file.stem in TENSOR_FILES else PTX_ARCHITECTURE


def architectures_of(file: Path) -> list[int]:
    """Those that there is machine code of a file for."""
    if file.stem in TILE_FILES:
        return TILE_ARCHITECTURES
    if file.stem in ONLY_FILES:
        return [ONLY_ARCHITECTURE]
    return [architecture for architecture in ARCHITECTURES if architecture >= oldest_of(file)]


def collected(into: Path, file: Path, texts, images, checks, verbose: bool):
    """Writes a file's images; returns its name, and what its kernels use."""
    name, of_file = file.stem, {}

    def note(architecture: str, found):
        for kernel, resource in found.items():
            of_file.setdefault(kernel, {})[architecture] = resource

    kernels = None
    if file in texts:
        text, _ = texts[file].result()
        kernels = entries(text)
        write(into / f"compute_{oldest_of(file)}" / f"{name}.ptx", text)
    for (of, architecture), check in checks.items():
        if of == file:
            note(f"ptx {architecture}", check.result())
    for architecture in architectures_of(file):
        image, log = images[file, architecture].result()
        found = resources(log, f"{file.name} for sm_{architecture}")
        if kernels is None:
            kernels = sorted(found)
        if sorted(found) != kernels:
            raise Failed(f"{file.name} for sm_{architecture}: kernels {sorted(found)}, in the PTX {kernels}")
        note(f"sm_{architecture}", found)
        write(into / f"sm_{architecture}" / f"{name}.cubin", image)
    if not kernels:
        raise Failed(f"{file.name}: no kernel is declared")
    if verbose:
        print(f"{file.name}: {len(kernels)} kernels", file=sys.stderr)
    return name, of_file


def write_table(into: Path, files: list[Path], used):
    """Writes the table that the program includes."""
    table = ["// Written by build.py.\n", "&[\n"]
    for file, (name, kernels) in zip(files, used):
        oldest = None if name in ONLY_FILES else oldest_of(file)
        table.append(entry(name, sorted(kernels), architectures_of(file), oldest))
    table.append("]\n")
    write(into / "table.rs", "".join(table).encode())


def entry(name: str, kernels: list[str], architectures: list[int], oldest: int | None) -> str:
    """A file's images in the table that the program includes; `oldest` is the architecture of its PTX."""
    lines = ["    Image {\n", f'        file: "{name}",\n', "        kernels: &[\n"]
    lines += [f'            "{kernel}",\n' for kernel in kernels]
    lines += ["        ],\n", "        cubins: &[\n"]
    lines += [f'            ({a}, include_bytes!("sm_{a}/{name}.cubin")),\n' for a in architectures]
    lines += ["        ],\n"]
    ptx = "None" if oldest is None else f'Some(({oldest}, include_str!("compute_{oldest}/{name}.ptx")))'
    lines += [f"        ptx: {ptx},\n", "    },\n"]
    return "".join(lines)


def write(path: Path, data: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def sums(images: Path) -> str:
    """SHA-256 of sources and images, as sha256sum prints them."""
    files = [(path.name, path) for path in [*HERE.glob("*.cu"), *HERE.glob("*.cuh")]]
    files += [(f"images/{path.relative_to(images)}", path) for path in images.rglob("*") if path.is_file()]
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in sorted(files))


def show(used):
    """Registers on each architecture, and shared memory, of every kernel; returns those that spill or have a stack frame."""
    columns = [f"sm_{a}" for a in ARCHITECTURES] + [f"ptx {a}" for a in ASSEMBLED]
    print("registers of a thread on each architecture (of cubins, of PTX when assembled); shared memory in bytes")
    print(f"{'kernel':32}" + "".join(f"{column:>8}" for column in columns) + f"{'shared':>8}")
    bad = []
    for file, kernels in used:
        allowed = TENSOR_SPILLS if file in TENSOR_FILES + ONLY_FILES else 0
        for kernel, by in sorted(kernels.items()):
            bad += [
                f"{kernel} on {column}: {by[column]['spills']} bytes spilled, a stack frame of {by[column]['stack']}"
                for column in columns
                if column in by and (by[column]["spills"] > allowed or by[column]["stack"] > allowed)
            ]
            registers = "".join(f"{by[column]['registers'] if column in by else '-':>8}" for column in columns)
            print(f"{kernel:32}{registers}{max(resource['shared'] for resource in by.values()):8}")
    return bad


def replace(images: Path):
    """Puts the images just built in the place of the committed ones."""
    committed = HERE / "images"
    for path in [path for path in committed.rglob("*") if path.is_file()]:
        if not (images / path.relative_to(committed)).exists():
            path.unlink()
    for path in [path for path in images.rglob("*") if path.is_file()]:
        write(committed / path.relative_to(images), path.read_bytes())
    (HERE / "SHA256SUMS").write_text(sums(committed))


def compare(images: Path):
    """Holds the committed images against those just built."""
    committed = HERE / "images"
    names = {path.relative_to(root) for root in (images, committed) for path in root.rglob("*") if path.is_file()}
    wrong = [str(name) for name in sorted(names) if read(images / name) != read(committed / name)]
    if wrong:
        raise Failed(f"these images are not what the sources give: {', '.join(wrong)}: run kernels/cuda/build.py")
    if read(HERE / "SHA256SUMS") != sums(images).encode():
        raise Failed("SHA256SUMS is not of these sources and images: run kernels/cuda/build.py")


def read(path: Path):
    return path.read_bytes() if path.is_file() else None


def main():
    parser = argparse.ArgumentParser(description="Compiles the CUDA kernels.")
    parser.add_argument("--check", action="store_true", help="compare with what is committed, and write nothing")
    check = parser.parse_args().check
    try:
        with tempfile.TemporaryDirectory() as folder:
            images = Path(folder)
            bad = show(build(images, verbose=not check))
            if check:
                compare(images)
                print(f"{sum(1 for path in images.rglob('*') if path.is_file())} files are what the sources give")
            else:
                replace(images)
        if bad:
            raise Failed("kernels want more registers than there are:\n" + "\n".join(bad))
    except Failed as failed:
        sys.exit(f"error: {failed}")


if __name__ == "__main__":
    main()
