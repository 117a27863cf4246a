//! The compiled kernels: for each source file cubins of several architectures, and PTX for those that come later.

use std::collections::HashMap;
use std::sync::LazyLock;

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
    /// Assembly text that the driver compiles itself, with the lowest architecture that takes it; `None` if the kernels are for
    /// the architectures of the machine code and for no other.
    pub ptx: Option<(u32, &'static str)>,
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
    /// device's, else the PTX. A file without PTX runs on its architectures alone. `None` if the file is for other devices.
    pub fn code(&self, architecture: u32, prefer: Prefer) -> Option<Code> {
        let runs = |built: u32| match self.ptx {
            Some(_) => built / 10 == architecture / 10 && built <= architecture,
            None => built == architecture,
        };
        let cubin = self.cubins.iter().rev().find(|(built, _)| prefer == Prefer::Cubin && runs(*built));
        let ptx =
            || self.ptx.filter(|(oldest, _)| *oldest <= architecture).map(|(oldest, text)| Code::Ptx(oldest, text));
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

/// The image that holds a kernel: one look into a table, since products ask each time.
pub fn holding(kernel: Kernel) -> Option<&'static Image> {
    static HELD: LazyLock<HashMap<Kernel, &'static Image>> = LazyLock::new(|| {
        let all = Kernel::all().into_iter();
        all.filter_map(|kernel| Some((kernel, named(&kernel.function())?))).collect()
    });
    HELD.get(&kernel).copied()
}

/// The image that holds a kernel of that name.
fn named(function: &str) -> Option<&'static Image> {
    IMAGES.iter().find(|image| image.kernels.contains(&function))
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: Image = Image {
        file: "a",
        kernels: &["a"],
        cubins: &[(75, b"75"), (80, b"80"), (86, b"86"), (89, b"89"), (90, b"90"), (100, b"100"), (120, b"120")],
        ptx: Some((75, "ptx")),
    };

    #[test]
    fn kernels_are_held_by_the_images_of_their_sources() {
        for kernel in Kernel::all() {
            let found = holding(kernel).map(|image| image.file);
            assert_eq!(found, named(&kernel.function()).map(|image| image.file), "{}", kernel.function());
            let expected = (!kernel.name.is_for_halves()).then(|| kernel.name.file());
            assert_eq!(found, expected, "{}", kernel.function());
        }
    }

    #[test]
    fn code_for_one_architecture_is_for_no_other() {
        let image = Image { file: "a", kernels: &["a"], cubins: &[(90, b"90")], ptx: None };
        for prefer in [Prefer::Cubin, Prefer::Ptx] {
            for architecture in [75, 80, 89, 91, 100, 120] {
                assert_eq!(image.code(architecture, prefer), None, "{architecture}");
            }
        }
        assert_eq!(image.code(90, Prefer::Cubin), Some(Code::Cubin(90, b"90")));
        assert_eq!(image.code(90, Prefer::Ptx), None);
    }

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
