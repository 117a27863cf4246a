//! The compiled kernels: for each source file cubins of several architectures, and PTX for those that come later.

use crate::backend::gpu::kernels::Kernel;

/// The compiled form of one file of `kernels/cuda`.
#[derive(Debug)]
pub struct Image {
    /// The file's name without its ending.
    pub file: &'static str,
    /// Names of its kernels.
    pub kernels: &'static [&'static str],
    /// Machine code with its architecture: 86 for compute capability 8.6. Ascending.
    pub cubins: &'static [(u32, &'static [u8])],
    /// Assembly text that the driver compiles itself, with the lowest architecture that takes it.
    pub ptx: (u32, &'static str),
}

/// All of them, by `kernels/cuda/build.py`.
pub const IMAGES: &[Image] = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/cuda/images/table.rs"));

/// The oldest architecture that there are kernels for.
pub const OLDEST: u32 = 75;

/// The oldest architecture whose code waits for the kernels before by itself.
const WAITS: u32 = 90;

/// Code for a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// Machine code of an architecture.
    Cubin(u32, &'static [u8]),
    /// Assembly text.
    Ptx(u32, &'static str),
}

/// Whether machine code is taken where there is some for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Prefer {
    /// It is.
    #[default]
    Cubin,
    /// The driver compiles the kernels: slow to start, and what a device newer than this program gets.
    Ptx,
}

impl Image {
    /// The code for a device: the cubin of the same major architecture with the highest minor that is not above the
    /// device's, else the PTX. `None` if the file is for newer devices.
    pub fn code(&self, architecture: u32, prefer: Prefer) -> Option<Code> {
        let runs = |built: u32| built / 10 == architecture / 10 && built <= architecture;
        let cubin = self.cubins.iter().rev().find(|(built, _)| prefer == Prefer::Cubin && runs(*built));
        let ptx = || (self.ptx.0 <= architecture).then_some(Code::Ptx(self.ptx.0, self.ptx.1));
        cubin.map(|&(built, bytes)| Code::Cubin(built, bytes)).or_else(ptx)
    }
}

impl Code {
    /// Whether its kernels wait for those before by themselves, and so may be started before these have ended:
    /// kernels/cuda/common.cuh, begin.
    pub fn waits(self) -> bool {
        matches!(self, Code::Cubin(WAITS.., _) | Code::Ptx(WAITS.., _))
    }

    /// `sm_90` or `compute_75 (PTX)`.
    pub fn name(self) -> String {
        match self {
            Code::Cubin(architecture, _) => format!("sm_{architecture}"),
            Code::Ptx(architecture, _) => format!("compute_{architecture} (PTX)"),
        }
    }
}

/// The code of most kernels for a device of that architecture; `None` if it is too old.
pub fn code(architecture: u32) -> Option<Code> {
    IMAGES.first()?.code(architecture, Prefer::default())
}

/// The image that holds a kernel.
pub fn holding(kernel: Kernel) -> Option<&'static Image> {
    let function = kernel.function();
    IMAGES.iter().find(|image| image.kernels.contains(&function.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: Image = Image {
        file: "a",
        kernels: &["a"],
        cubins: &[(75, b"75"), (80, b"80"), (86, b"86"), (89, b"89"), (90, b"90"), (100, b"100"), (120, b"120")],
        ptx: (75, "ptx"),
    };

    #[test]
    fn a_device_gets_the_nearest_code_that_it_runs() {
        let name = |architecture| IMAGE.code(architecture, Prefer::Cubin).map(Code::name);
        for (device, code) in [
            (75, "sm_75"),
            (80, "sm_80"),
            (86, "sm_86"),
            (87, "sm_86"),
            (88, "sm_86"),
            (89, "sm_89"),
            (90, "sm_90"),
            (100, "sm_100"),
            (103, "sm_100"),
            (110, "compute_75 (PTX)"),
            (120, "sm_120"),
            (121, "sm_120"),
            (130, "compute_75 (PTX)"),
        ] {
            assert_eq!(name(device).as_deref(), Some(code), "{device}");
        }
        assert_eq!(name(70), None);
        let waits = |architecture, prefer| IMAGE.code(architecture, prefer).unwrap().waits();
        assert!(waits(90, Prefer::Cubin) && waits(121, Prefer::Cubin));
        assert!(!waits(89, Prefer::Cubin) && !waits(90, Prefer::Ptx) && !waits(130, Prefer::Cubin));
        assert_eq!(IMAGE.code(90, Prefer::Ptx), Some(Code::Ptx(75, "ptx")));
    }
}
