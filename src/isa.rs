//! Instruction sets of this CPU: values that prove that it has them.
//!
//! A kernel that needs AVX2 takes an [`Avx2`], and nobody has one but from detection. So a kernel is safe to call for
//! whoever can name its argument, and the choice of the fastest is made in one place.

use std::fmt;

/// Proof of AVX2, FMA and F16C (Haswell, Zen and newer).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2(());

/// Proof of AVX-512 F, BW, VL and VBMI (Ice Lake, Zen 4 and newer), and of what [`Avx2`] proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512(());

/// An instruction set that this CPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Nothing beyond the target of the build.
    Plain,
    /// 256-bit vectors.
    Avx2(Avx2),
    /// 512-bit vectors.
    Avx512(Avx512),
}

impl Avx2 {
    /// The proof, where there is one.
    pub fn detect() -> Option<Avx2> {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            return Some(Avx2(()));
        }
        None
    }
}

impl Avx512 {
    /// The proof, where there is one.
    pub fn detect() -> Option<Avx512> {
        #[cfg(target_arch = "x86_64")]
        if Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi")
        {
            return Some(Avx512(()));
        }
        None
    }
}

impl Isa {
    /// Every name, whether this CPU has it or not, slowest first.
    pub const NAMES: [&'static str; 3] = ["plain", "avx2", "avx512"];

    /// What this CPU has, slowest first.
    pub fn available() -> Vec<Isa> {
        let (avx2, avx512) = (Avx2::detect().map(Isa::Avx2), Avx512::detect().map(Isa::Avx512));
        [Some(Isa::Plain), avx2, avx512].into_iter().flatten().collect()
    }

    /// The fastest that this CPU has.
    pub fn detect() -> Isa {
        match (Avx512::detect(), Avx2::detect()) {
            (Some(avx512), _) => Isa::Avx512(avx512),
            (None, Some(avx2)) => Isa::Avx2(avx2),
            (None, None) => Isa::Plain,
        }
    }

    /// Its name, one of [`Isa::NAMES`].
    pub fn name(self) -> &'static str {
        match self {
            Isa::Plain => "plain",
            Isa::Avx2(_) => "avx2",
            Isa::Avx512(_) => "avx512",
        }
    }

    /// The one of that name, if this CPU has it.
    pub fn named(name: &str) -> Option<Isa> {
        Isa::available().into_iter().find(|isa| isa.name() == name)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the CPU has is used: asked of it in another way than the code under test does.
    #[test]
    fn available_is_what_the_cpu_has() {
        let names: Vec<&str> = Isa::available().iter().map(|isa| isa.name()).collect();
        let mut expected = vec!["plain"];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                [is_x86_feature_detected!("avx2"), is_x86_feature_detected!("fma"), is_x86_feature_detected!("f16c")];
            let avx512 = [
                is_x86_feature_detected!("avx512f"),
                is_x86_feature_detected!("avx512bw"),
                is_x86_feature_detected!("avx512vl"),
                is_x86_feature_detected!("avx512vbmi"),
            ];
            if avx2 == [true; 3] {
                expected.push("avx2");
            }
            if avx2 == [true; 3] && avx512 == [true; 4] {
                expected.push("avx512");
            }
        }
        assert_eq!(names, expected);
        assert_eq!(Isa::detect().name(), *expected.last().unwrap());
    }

    #[test]
    fn names_are_read_back() {
        for name in Isa::NAMES {
            let has = Isa::available().iter().any(|isa| isa.name() == name);
            assert_eq!(Isa::named(name).map(Isa::name), has.then_some(name));
        }
        assert_eq!(Isa::named("AVX2"), None);
        assert_eq!(Isa::Plain.to_string(), "plain");
    }
}
