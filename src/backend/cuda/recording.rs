//! Launches that are recorded once and done again and again: a graph of the driver's.

use std::sync::Arc;

use super::api::{self, Handle};
use super::stream::{Held, State, Stream};
use crate::backend::gpu::driver::{Clock, Elapsed};
use crate::backend::gpu::kernels::Kernel;
use crate::error::Result;

/// Launches that were recorded.
#[derive(Debug)]
pub struct Recording {
    stream: Arc<Stream>,
    graph: Handle,
    recorded: Recorded,
}

/// What is known of launches that are recorded.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    launches: u64,
    last: Option<Kernel>,
    /// Memory that they use.
    held: Vec<Arc<Held>>,
}

impl Recorded {
    /// Notes a launch and what it uses.
    pub fn add(&mut self, kernel: Kernel, buffers: impl Iterator<Item = Arc<Held>>) {
        self.launches += 1;
        self.last = Some(kernel);
        self.held.extend(buffers);
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let Ok(mut state) = self.stream.enter() else { return };
        if state.recorded.is_none() {
            // An error of a kernel is told by whoever waits for it next: the driver repeats it.
            let _ = self.stream.finish(&mut state);
        }
        // SAFETY: it was made by `Stream::record` and goes once; the driver lets launches of it come to their end.
        unsafe { (self.stream.api.cuGraphExecDestroy)(self.graph) };
    }
}

impl Stream {
    /// Records the launches of `work`.
    pub fn record(self: &Arc<Self>, work: &mut dyn FnMut() -> Result<()>) -> Result<Recording> {
        {
            let mut state = self.begin()?;
            assert!(state.recorded.is_none(), "launches are recorded already");
            // SAFETY: the stream is there as long as `self` is, and records nothing yet.
            let code = unsafe { (self.api.cuStreamBeginCapture_v2)(state.stream(), api::STREAM_CAPTURE_MODE_RELAXED) };
            self.check_after(&mut state, code, "record launches", "cuStreamBeginCapture_v2")?;
            state.recorded = Some(Recorded::default());
        }
        let worked = work();
        let mut state = self.enter()?;
        let recorded = state.recorded.take().unwrap_or_default();
        let mut graph = Handle::NULL;
        // SAFETY: the pointer is to a local variable; the stream records since the call above.
        let code = unsafe { (self.api.cuStreamEndCapture)(state.stream(), &mut graph) };
        let ended = self.check_after(&mut state, code, "record launches", "cuStreamEndCapture");
        let made = worked.and(ended).and_then(|()| self.instantiate(&mut state, graph));
        if !graph.is_null() {
            // SAFETY: what was made of it does not need it any more.
            unsafe { (self.api.cuGraphDestroy)(graph) };
        }
        for address in std::mem::take(&mut state.left) {
            let _ = self.finish(&mut state);
            // SAFETY: nobody has it any more, and what used it has been done.
            unsafe { (self.api.cuMemFree_v2)(address) };
        }
        // Memory that goes with what could not be made takes the lock again.
        drop(state);
        made.map(|graph| Recording { stream: Arc::clone(self), graph, recorded })
    }

    /// Makes of a graph what can be launched.
    fn instantiate(&self, state: &mut State, graph: Handle) -> Result<Handle> {
        let mut made = Handle::NULL;
        // SAFETY: the pointer is to a local variable, the graph was just made.
        let code = unsafe { (self.api.cuGraphInstantiateWithFlags)(&mut made, graph, 0) };
        self.check_after(state, code, "make recorded launches ready", "cuGraphInstantiateWithFlags")?;
        Ok(made)
    }

    /// Does what was recorded.
    pub fn replay(&self, recording: &Recording) -> Result<()> {
        let mut state = self.begin()?;
        self.launch_graph(&mut state, recording)
    }

    fn launch_graph(&self, state: &mut State, recording: &Recording) -> Result<()> {
        assert!(std::ptr::eq(self, &*recording.stream), "a recording of another device");
        assert!(state.recorded.is_none(), "nothing is replayed while launches are recorded");
        let Some(last) = recording.recorded.last else { return Ok(()) };
        // SAFETY: the graph is there as long as the recording is, the stream as long as `self`.
        let code = unsafe { (self.api.cuGraphLaunch)(recording.graph, state.stream()) };
        self.check_after(state, code, "start recorded launches", "cuGraphLaunch")?;
        state.was_launched(recording.recorded.launches, last);
        Ok(())
    }

    /// Does what was recorded so many times: the seconds between two events of the device.
    pub fn timed(&self, recording: &Recording, times: u32) -> Result<Elapsed> {
        let mut state = self.begin()?;
        self.finish(&mut state)?;
        let mut events = Events { stream: self, handles: [Handle::NULL; 2] };
        for event in &mut events.handles {
            // SAFETY: the pointer is to a local variable; the context has been entered.
            let code = unsafe { (self.api.cuEventCreate)(event, api::EVENT_DEFAULT) };
            self.check_after(&mut state, code, "make an event", "cuEventCreate")?;
        }
        let [first, last] = events.handles;
        self.mark(&mut state, first)?;
        for _ in 0..times {
            self.launch_graph(&mut state, recording)?;
        }
        self.mark(&mut state, last)?;
        self.finish(&mut state)?;
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is to a local variable; both events have been recorded, and the stream has passed them.
        let code = unsafe { (self.api.cuEventElapsedTime)(&mut milliseconds, first, last) };
        self.check_after(&mut state, code, "measure time", "cuEventElapsedTime")?;
        Ok(Elapsed { seconds: f64::from(milliseconds) / 1e3, clock: Clock::Device })
    }

    /// Lets the stream pass an event.
    fn mark(&self, state: &mut State, event: Handle) -> Result<()> {
        // SAFETY: event and stream are there until the caller is done with them.
        let code = unsafe { (self.api.cuEventRecord)(event, state.stream()) };
        self.check_after(state, code, "measure time", "cuEventRecord")
    }
}

/// Two events that go again, whatever happens in between.
struct Events<'s> {
    stream: &'s Stream,
    handles: [Handle; 2],
}

impl Drop for Events<'_> {
    fn drop(&mut self) {
        for event in self.handles.into_iter().filter(|event| !event.is_null()) {
            // SAFETY: it was made once and goes once; the driver keeps what the stream has still to pass.
            unsafe { (self.stream.api.cuEventDestroy_v2)(event) };
        }
    }
}
