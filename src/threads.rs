//! A pool of threads of a size that the user chose.

use std::path::Path;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Fault, Result};
use crate::limits;

/// A pool of so many threads; at most [`limits::MAX_THREADS`], 0 for one per core. `path` is what they will work on, for messages.
pub fn pool(threads: usize, path: &Path) -> Result<ThreadPool> {
    let built = ThreadPoolBuilder::new().num_threads(threads.min(limits::MAX_THREADS)).build();
    built.map_err(|e| Fault::io("start threads", path, std::io::Error::other(e)))
}

/// Seconds that all threads of this process have been on a core; 0 where the system does not tell.
pub fn process_seconds() -> f64 {
    #[cfg(unix)]
    {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
    }
    #[cfg(not(unix))]
    0.0
}

/// Seconds that this thread has been on a core; elsewhere than on Unix, of the clock on the wall. Only differences count.
pub fn core_seconds() -> f64 {
    #[cfg(unix)]
    {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
    }
    #[cfg(not(unix))]
    {
        static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
        START.get_or_init(std::time::Instant::now).elapsed().as_secs_f64()
    }
}
