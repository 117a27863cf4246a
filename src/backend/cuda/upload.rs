//! Uploads: copies on a stream of their own, beside what is computed.
//!
//! They go through a ring of buffers in pinned memory. Two events order both streams where the caller asks for it; between,
//! neither waits for the other.

use rayon::prelude::*;

use super::api::Handle;
use super::stream::{Buffer, STAGING_BYTES, Staging, State, Stream};
use crate::error::Result;

/// Buffers in pinned memory through which uploads go.
const RING: usize = 4;
/// Bytes that a core copies into pinned memory.
const COPIED_BYTES: usize = 1 << 20;

/// The stream for uploads.
#[derive(Debug)]
pub(super) struct Uploads {
    stream: Handle,
    ring: Vec<Staging>,
    /// The buffer of the ring whose turn it is.
    next: usize,
    /// Recorded on one stream for the other to wait for.
    event: Option<Handle>,
}

impl Stream {
    /// The stream for uploads, which is made with the first of them.
    fn uploads<'s>(&self, state: &'s mut State) -> Result<&'s mut Uploads> {
        if state.uploads.is_none() {
            let stream = self.make_stream()?;
            // Whatever fails from here on, the drop of `Stream` finds what there is.
            state.uploads = Some(Uploads { stream, ring: Vec::new(), next: 0, event: None });
        }
        let uploads = state.uploads.as_mut().expect("just made");
        if uploads.event.is_none() {
            uploads.event = Some(self.make_event()?);
        }
        while uploads.ring.len() < RING {
            self.add_staging(&mut uploads.ring)?;
        }
        Ok(uploads)
    }

    /// Copies bytes to the device beside what is computed.
    pub fn upload(&self, to: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut address = to.at(offset, bytes.len());
        let mut state = self.begin()?;
        for chunk in bytes.chunks(STAGING_BYTES) {
            let uploads = self.uploads(&mut state)?;
            let (stream, staging) = (uploads.stream, uploads.ring[uploads.next]);
            uploads.next = (uploads.next + 1) % RING;
            // SAFETY: the event is there as long as `self` is.
            let code = unsafe { (self.api.cuEventSynchronize)(staging.event) };
            self.check_after(&mut state, code, "copy to the device", "cuEventSynchronize")?;
            // SAFETY: the copy that last used the buffer has been done, the chunk is no longer than it, and the driver's
            // memory is no object of this program.
            let pinned = unsafe { std::slice::from_raw_parts_mut(staging.host.cast::<u8>(), chunk.len()) };
            // One core copies less than the bus takes.
            let parts = pinned.par_chunks_mut(COPIED_BYTES).zip(chunk.par_chunks(COPIED_BYTES));
            parts.for_each(|(to, from)| to.copy_from_slice(from));
            // SAFETY: both sides hold the bytes: the address by `Buffer::at`. The event keeps the pinned side from being
            // used again before its time.
            let code = unsafe { (self.api.cuMemcpyHtoDAsync_v2)(address, staging.host, chunk.len(), stream) };
            self.check_after(&mut state, code, "copy to the device", "cuMemcpyHtoDAsync_v2")?;
            // SAFETY: as for the wait.
            let code = unsafe { (self.api.cuEventRecord)(staging.event, stream) };
            self.check_after(&mut state, code, "copy to the device", "cuEventRecord")?;
            address += chunk.len() as u64;
        }
        Ok(())
    }

    /// Uploads from here on come after every launch before.
    pub fn uploads_after_launches(&self) -> Result<()> {
        let mut state = self.begin()?;
        let (launches, uploads) = (state.stream(), self.uploads(&mut state)?.stream);
        self.order(&mut state, launches, uploads)
    }

    /// Launches from here on come after every upload before.
    pub fn launches_after_uploads(&self) -> Result<()> {
        let mut state = self.begin()?;
        let (launches, uploads) = (state.stream(), self.uploads(&mut state)?.stream);
        self.order(&mut state, uploads, launches)
    }

    /// What is asked of one stream from here on waits for what was asked of another.
    fn order(&self, state: &mut State, before: Handle, after: Handle) -> Result<()> {
        let event = state.uploads.as_ref().and_then(|uploads| uploads.event).expect("made with its stream");
        // SAFETY: event and streams are there as long as `self` is.
        let code = unsafe { (self.api.cuEventRecord)(event, before) };
        self.check_after(state, code, "order copies and kernels", "cuEventRecord")?;
        // SAFETY: as above; the driver takes the event as it was recorded last before this call.
        let code = unsafe { (self.api.cuStreamWaitEvent)(after, event, 0) };
        self.check_after(state, code, "order copies and kernels", "cuStreamWaitEvent")
    }

    /// Gives back what uploads used; the context has been entered.
    pub(super) fn free_uploads(&self, uploads: &Uploads) {
        // SAFETY: each was made once and goes once, after all that uses it has been done.
        unsafe { (self.api.cuStreamSynchronize)(uploads.stream) };
        self.free_staging(&uploads.ring);
        // SAFETY: as above.
        unsafe {
            if let Some(event) = uploads.event {
                (self.api.cuEventDestroy_v2)(event);
            }
            (self.api.cuStreamDestroy_v2)(uploads.stream);
        }
    }
}
