//! Copies from one device to another: whatever is asked of either stream later comes after them.

use std::ffi::c_int;

use super::api::{self, Handle, PEER_ACCESS_ALREADY_ENABLED};
use super::stream::{Buffer, Stream};
use crate::backend::gpu::driver::Route;
use crate::error::Result;

/// An event on a stream.
struct Mark<'s> {
    stream: &'s Stream,
    event: Handle,
}

impl Drop for Mark<'_> {
    fn drop(&mut self) {
        if self.stream.context().enter(self.stream.label()).is_ok() {
            // SAFETY: it was made once and goes once; the driver keeps what waits for it.
            unsafe { (self.stream.api().cuEventDestroy_v2)(self.event) };
        }
    }
}

/// Whether a device can read the memory of another by itself; both by the driver's own numbers.
pub(super) fn can_access(api: &api::Api, label: &str, device: c_int, peer: c_int) -> Result<bool> {
    let mut can: c_int = 0;
    // SAFETY: the pointer is to a local variable, the numbers are the driver's.
    let code = unsafe { (api.cuDeviceCanAccessPeer)(&mut can, device, peer) };
    api.check(code, || api::Call::new(label, "ask for access to another GPU", "cuDeviceCanAccessPeer"))?;
    Ok(can != 0)
}

impl Stream {
    /// Lets the device read the memory of another, where it can.
    pub fn meet(&self, other: &Stream) -> Result<Route> {
        let (own, theirs) = (self.context(), other.context());
        if own.device() == theirs.device() {
            return Ok(Route::SameDevice);
        }
        if !can_access(self.api(), self.label(), own.device(), theirs.device())? {
            return Ok(Route::Driver);
        }
        own.enter(self.label())?;
        // SAFETY: both contexts are there as long as their streams are.
        let code = unsafe { (self.api().cuCtxEnablePeerAccess)(theirs.handle(), 0) };
        if code != PEER_ACCESS_ALREADY_ENABLED {
            self.check(code, format!("get access to {}", other.label()), "cuCtxEnablePeerAccess")?;
        }
        Ok(Route::Peer)
    }

    /// Copies the first bytes of a buffer of another stream.
    pub fn copy_from(&self, to: &Buffer, other: &Stream, from: &Buffer, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let (target, source) = (to.at(0, bytes as usize), from.at(0, bytes as usize));
        let doing = || format!("copy from {}", other.label());
        let written = other.marked()?;
        self.follow(&written)?;
        let (own, theirs) = (self.context(), other.context());
        let mut state = self.begin()?;
        let stream = state.stream();
        if own.device() == theirs.device() {
            // SAFETY: both sides hold the bytes, by `Buffer::at`, and belong to this context.
            let code = unsafe { (self.api().cuMemcpyDtoDAsync_v2)(target, source, bytes as usize, stream) };
            self.check_after(&mut state, code, doing(), "cuMemcpyDtoDAsync_v2")?;
        } else {
            // SAFETY: both sides hold the bytes, each in its context, which its stream keeps.
            let code = unsafe {
                let (to_context, from_context) = (own.handle(), theirs.handle());
                (self.api().cuMemcpyPeerAsync)(target, to_context, source, from_context, bytes as usize, stream)
            };
            self.check_after(&mut state, code, doing(), "cuMemcpyPeerAsync")?;
        }
        drop(state);
        // The source is not written again before it was read.
        other.follow(&self.marked()?)
    }

    /// An event after all that was asked for.
    fn marked(&self) -> Result<Mark<'_>> {
        let mut state = self.begin()?;
        let mut event = Handle::NULL;
        // SAFETY: the pointer is to a local variable; the context has been entered.
        let code = unsafe { (self.api().cuEventCreate)(&mut event, api::EVENT_DISABLE_TIMING) };
        self.check_after(&mut state, code, "make an event", "cuEventCreate")?;
        let mark = Mark { stream: self, event };
        // SAFETY: event and stream are of this context.
        let code = unsafe { (self.api().cuEventRecord)(event, state.stream()) };
        self.check_after(&mut state, code, "copy between GPUs", "cuEventRecord")?;
        Ok(mark)
    }

    /// Lets what is asked for from here on wait for an event of another stream.
    fn follow(&self, mark: &Mark<'_>) -> Result<()> {
        let mut state = self.begin()?;
        // SAFETY: the event is there, the stream is of this context.
        let code = unsafe { (self.api().cuStreamWaitEvent)(state.stream(), mark.event, 0) };
        self.check_after(&mut state, code, "copy between GPUs", "cuStreamWaitEvent")
    }
}
