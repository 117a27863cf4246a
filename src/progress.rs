//! How a long run tells what it is doing.

/// Told what a run does.
pub trait Progress: Sync {
    /// A run, or a phase of one, over so many bytes of input begins.
    fn start(&self, source_bytes: u64);
    /// A file is being worked on.
    fn file(&self, name: &str);
    /// A step begins whose end nobody can foresee.
    fn step(&self, _name: &str) {}
    /// So many bytes of input were read and so many bytes of output written.
    fn advance(&self, source_bytes: u64, output_bytes: u64);
    /// Nothing can be done until these arrive: each with the reason.
    fn waiting(&self, _missing: &[String]) {}
    /// Whether the user wants the run to end.
    fn interrupted(&self) -> bool {
        false
    }
    /// The run, or the phase, is over, well or not.
    fn end(&self);
}

/// Tells nobody.
#[derive(Debug)]
pub struct Silent;

impl Progress for Silent {
    fn start(&self, _source_bytes: u64) {}
    fn file(&self, _name: &str) {}
    fn advance(&self, _source_bytes: u64, _output_bytes: u64) {}
    fn end(&self) {}
}
