//! One stream of a device: everything that is asked for goes through it, in order, but for uploads (`super::upload`).

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::api::{self, Address, Api, Call, Handle, OUT_OF_MEMORY, fault};
use super::device::{Context, Description};
use super::images::{self, Code, Prefer};
use super::recording::Recorded;
use super::upload::Uploads;
use crate::backend::gpu::driver::{DeviceMemory, Launch};
use crate::backend::gpu::kernels::Kernel;
use crate::error::{FaultKind, Result};

/// Bytes of one of the two buffers in pinned memory through which everything is copied.
pub(super) const STAGING_BYTES: usize = 8 << 20;
/// Words of constants that a kernel is given; it reads as many as its struct has.
const CONSTANTS: usize = 32;
/// Most buffers of a kernel.
const BUFFERS: usize = 9;

/// A stream with its context, staging memory and kernels.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) api: &'static Api,
    description: Description,
    label: String,
    prefer: Prefer,
    state: Mutex<State>,
    context: Context, // the last to go
}

/// What one caller at a time uses.
#[derive(Debug, Default)]
pub(super) struct State {
    stream: Option<Handle>,
    staging: Vec<Staging>,
    /// A stream for uploads, from the first of them on.
    pub(super) uploads: Option<Uploads>,
    modules: HashMap<&'static str, Handle>,
    functions: HashMap<Kernel, Function>,
    /// Groups that run at the same time, with so many bytes of shared memory.
    resident: HashMap<(Kernel, u32), u32>,
    /// Kernels started since the last wait, and the last of them.
    pub(super) launched: Option<(u64, Kernel)>,
    /// Launches that are recorded, while they are.
    pub(super) recorded: Option<Recorded>,
    /// Memory that nobody has any more since launches are recorded: nothing may be waited for then.
    pub(super) left: Vec<Address>,
    /// The call that failed, and its code: what was asked for may not have been done.
    failed: Option<(&'static str, u32)>,
}

/// A kernel that is ready.
#[derive(Debug, Clone, Copy)]
struct Function {
    handle: Handle,
    /// Whether it may be started before the kernel before has ended.
    early: bool,
}

/// A buffer in pinned memory, and the event after the copy that last used it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Staging {
    pub host: *mut c_void,
    pub event: Handle,
}

// SAFETY: pinned memory belongs to the process; whoever holds the lock of `State` is the only one to use it.
unsafe impl Send for Staging {}

/// Memory of a device.
#[derive(Debug)]
pub struct Buffer(Arc<Held>);

/// Memory that goes when neither its owner nor a recording has it.
#[derive(Debug)]
pub(super) struct Held {
    stream: Arc<Stream>,
    address: Address,
    bytes: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        let Ok(mut state) = self.stream.enter() else { return };
        if state.recorded.is_some() {
            state.left.push(self.address);
            return;
        }
        // An error of a kernel is told by whoever waits for it next: the driver repeats it.
        let _ = self.stream.finish(&mut state);
        // SAFETY: nothing uses the memory any more: all that was asked for has been done, and the owner is gone.
        unsafe { (self.stream.api.cuMemFree_v2)(self.address) };
    }
}

impl Buffer {
    /// How many there are.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// The address of a part; `offset` and `bytes` lie within.
    pub(super) fn at(&self, offset: u64, bytes: usize) -> Address {
        assert!(
            offset.checked_add(bytes as u64).is_some_and(|end| end <= self.0.bytes),
            "{bytes} bytes at {offset} of a buffer of {} bytes",
            self.0.bytes
        );
        assert!(offset.is_multiple_of(4) && bytes.is_multiple_of(4), "{bytes} bytes at {offset}: no whole words");
        self.0.address + offset
    }
}

impl Stream {
    /// A stream of the device of that number.
    pub fn open(ordinal: usize, prefer: Prefer) -> Result<Stream> {
        let api = Api::get()?;
        let (description, device) = super::device::describe(api, ordinal)?;
        description.usable()?;
        let label = description.label();
        let context = Context::of(api, device, &label)?;
        let stream = Stream { api, description, label, prefer, state: Mutex::default(), context };
        stream.prepare()?;
        Ok(stream)
    }

    /// The device.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// The device in messages.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The driver's functions.
    pub(super) fn api(&self) -> &'static Api {
        self.api
    }

    /// The device's context.
    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Makes the stream and its staging memory.
    fn prepare(&self) -> Result<()> {
        let mut state = self.enter()?;
        state.stream = Some(self.make_stream()?);
        for _ in 0..2 {
            // Whatever fails from here on, the drop of `Stream` finds what there is.
            self.add_staging(&mut state.staging)?;
        }
        Ok(())
    }

    /// A stream; the context has been entered.
    pub(super) fn make_stream(&self) -> Result<Handle> {
        let mut handle = Handle::NULL;
        // SAFETY: the pointer is to a local variable; the context has been entered.
        let code = unsafe { (self.api.cuStreamCreate)(&mut handle, api::STREAM_NON_BLOCKING) };
        self.check(code, "make a stream", "cuStreamCreate").map(|()| handle)
    }

    /// An event; the context has been entered.
    pub(super) fn make_event(&self) -> Result<Handle> {
        let mut handle = Handle::NULL;
        // SAFETY: the pointer is to a local variable; the context has been entered.
        let code = unsafe { (self.api.cuEventCreate)(&mut handle, api::EVENT_DISABLE_TIMING) };
        self.check(code, "make an event", "cuEventCreate").map(|()| handle)
    }

    /// Adds a buffer in pinned memory to some; the context has been entered.
    pub(super) fn add_staging(&self, staging: &mut Vec<Staging>) -> Result<()> {
        let mut host = std::ptr::null_mut();
        // SAFETY: the pointer is to a local variable; the context has been entered.
        let code = unsafe { (self.api.cuMemAllocHost_v2)(&mut host, STAGING_BYTES) };
        self.check(code, format!("pin {STAGING_BYTES} bytes of memory for copies"), "cuMemAllocHost_v2")?;
        staging.push(Staging { host, event: Handle::NULL });
        staging.last_mut().expect("it was pushed").event = self.make_event()?;
        Ok(())
    }

    /// Gives staging memory back; what used it has been done, and the context has been entered.
    pub(super) fn free_staging(&self, staging: &[Staging]) {
        for staging in staging {
            // SAFETY: each was made once and goes once.
            unsafe {
                if !staging.event.is_null() {
                    (self.api.cuEventDestroy_v2)(staging.event);
                }
                (self.api.cuMemFreeHost)(staging.host);
            }
        }
    }

    /// The state, for one caller; calls of this thread are about the device from here on.
    pub(super) fn enter(&self) -> Result<MutexGuard<'_, State>> {
        // What a panic leaves behind is whole: every step ends before its result is noted.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.context.enter(&self.label)?;
        Ok(state)
    }

    /// `Ok` for success of a call that waits for nothing.
    pub(super) fn check(&self, code: u32, doing: impl Into<String>, call: &'static str) -> Result<()> {
        self.api.check(code, || Call::new(&self.label, doing, call))
    }

    /// `Ok` for success of a call that also tells errors of earlier ones. After an error nothing more is done.
    pub(super) fn check_after(
        &self,
        state: &mut State,
        code: u32,
        doing: impl Into<String>,
        call: &'static str,
    ) -> Result<()> {
        let checked = self.api.check(code, || {
            let launched = state.launched.map(|(count, last)| (count, last.function()));
            Call::new(&self.label, doing, call).after(launched)
        });
        if checked.is_err() {
            state.failed.get_or_insert((call, code));
        }
        checked
    }

    /// The state, for whoever asks for something to be done: nothing is, once something has failed.
    pub(super) fn begin(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.enter()?;
        match state.failed {
            Some((call, code)) => self.check(code, "go on after an error", call).map(|()| state),
            None => Ok(state),
        }
    }

    /// Waits until everything has been done.
    pub(super) fn finish(&self, state: &mut State) -> Result<()> {
        assert!(state.recorded.is_none(), "nothing is waited for while launches are recorded");
        // SAFETY: the stream is there as long as `self` is.
        let code = unsafe { (self.api.cuStreamSynchronize)(state.stream()) };
        self.check_after(state, code, "compute", "cuStreamSynchronize")?;
        state.launched = None;
        Ok(())
    }

    /// Waits until everything has been done.
    pub fn wait(&self) -> Result<()> {
        let mut state = self.begin()?;
        self.finish(&mut state)
    }

    /// Memory of the device.
    pub fn memory(&self) -> Result<DeviceMemory> {
        let _state = self.enter()?;
        self.context.memory(&self.label)
    }

    /// Makes a buffer.
    pub fn allocate(self: &Arc<Self>, bytes: u64, purpose: &str) -> Result<Buffer> {
        let mut state = self.begin()?;
        let mut address = 0;
        // SAFETY: the pointer is to a local variable; the context has been entered. No allocation is of 0 bytes.
        let code = unsafe { (self.api.cuMemAlloc_v2)(&mut address, bytes.max(4) as usize) };
        if code == OUT_OF_MEMORY {
            let DeviceMemory { free, total } = self.context.memory(&self.label)?;
            let (device, purpose) = (self.label.clone(), purpose.to_owned());
            return Err(fault(FaultKind::GpuMemory { device, purpose, wanted: bytes, free, total }));
        }
        self.check_after(&mut state, code, format!("take {bytes} bytes for {purpose}"), "cuMemAlloc_v2")?;
        Ok(Buffer(Arc::new(Held { stream: Arc::clone(self), address, bytes: bytes.max(4) })))
    }

    /// Copies bytes to the device. They go through pinned memory, so that copying to it and from it overlap.
    pub fn write(&self, to: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut address = to.at(offset, bytes.len());
        let mut state = self.begin()?;
        assert!(state.recorded.is_none(), "nothing is copied while launches are recorded");
        for chunk in bytes.chunks(STAGING_BYTES) {
            let (stream, staging) = (state.stream(), state.turn());
            // SAFETY: the event and the stream are there as long as `self` is.
            let code = unsafe { (self.api.cuEventSynchronize)(staging.event) };
            self.check_after(&mut state, code, "copy to the device", "cuEventSynchronize")?;
            // SAFETY: the copy that last used the buffer has been done, and the chunk is no longer than it.
            unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), staging.host.cast(), chunk.len()) };
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

    /// Copies bytes back, when everything before has been done.
    pub fn read(&self, from: &Buffer, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let mut address = from.at(offset, bytes.len());
        let mut state = self.begin()?;
        assert!(state.recorded.is_none(), "nothing is copied while launches are recorded");
        for chunk in bytes.chunks_mut(STAGING_BYTES) {
            let (stream, staging) = (state.stream(), state.turn());
            // SAFETY: both sides hold the bytes, and whatever used the pinned side before comes earlier in the stream.
            let code = unsafe { (self.api.cuMemcpyDtoHAsync_v2)(staging.host, address, chunk.len(), stream) };
            self.check_after(&mut state, code, "copy from the device", "cuMemcpyDtoHAsync_v2")?;
            self.finish(&mut state)?;
            // SAFETY: the copy has been done, and nobody else uses the buffer.
            unsafe { std::ptr::copy_nonoverlapping(staging.host.cast(), chunk.as_mut_ptr(), chunk.len()) };
            address += chunk.len() as u64;
        }
        if bytes.is_empty() { self.finish(&mut state) } else { Ok(()) }
    }

    /// Starts a kernel.
    pub fn launch(&self, launch: &Launch<'_, Buffer>) -> Result<()> {
        let kernel = launch.kernel;
        assert_eq!(launch.buffers.len(), kernel.name.buffers(), "buffers of {}", kernel.function());
        assert!(launch.constants.len() <= CONSTANTS, "constants of {}", kernel.function());
        let mut state = self.begin()?;
        let Function { handle: function, early } = self.function(&mut state, kernel)?;
        let mut addresses = [0 as Address; BUFFERS];
        let mut constants = [0u32; CONSTANTS];
        let mut parameters = [std::ptr::null_mut::<c_void>(); BUFFERS + 1];
        constants[..launch.constants.len()].copy_from_slice(launch.constants);
        for (i, buffer) in launch.buffers.iter().enumerate() {
            addresses[i] = buffer.0.address;
            parameters[i] = (&raw mut addresses[i]).cast();
        }
        parameters[launch.buffers.len()] = (&raw mut constants).cast();
        let ([x, y, z], threads) = (launch.groups, kernel.name.threads());
        let (stream, extra, shared) = (state.stream(), std::ptr::null_mut(), launch.shared_bytes);
        // SAFETY: the driver copies the parameters before it returns: an address for each pointer of the kernel, and for its
        // struct as many words as it has, which are at most those of `constants`.
        let (code, call) = if early {
            let early =
                api::LaunchAttribute { id: api::LAUNCH_EARLY, padding: [0; 4], value: [1, 0, 0, 0, 0, 0, 0, 0] };
            let config = api::LaunchConfig {
                groups: [x, y, z],
                threads: [threads, 1, 1],
                shared_bytes: shared,
                stream,
                attributes: &early,
                attribute_count: 1,
            };
            // SAFETY: as above; what the config points to is there until the call returns.
            let code = unsafe { (self.api.cuLaunchKernelEx)(&config, function, parameters.as_mut_ptr(), extra) };
            (code, "cuLaunchKernelEx")
        } else {
            let parameters = parameters.as_mut_ptr();
            // SAFETY: as above.
            let code = unsafe {
                (self.api.cuLaunchKernel)(function, x, y, z, threads, 1, 1, shared, stream, parameters, extra)
            };
            (code, "cuLaunchKernel")
        };
        if code != api::SUCCESS {
            self.check_after(&mut state, code, format!("start the kernel {}", kernel.function()), call)?;
        }
        match &mut state.recorded {
            Some(recorded) => recorded.add(kernel, launch.buffers.iter().map(|buffer| Arc::clone(&buffer.0))),
            None => state.was_launched(1, kernel),
        }
        Ok(())
    }

    /// The function of a kernel; its module is loaded when the first of its kernels is wanted.
    fn function(&self, state: &mut State, kernel: Kernel) -> Result<Function> {
        if let Some(&function) = state.functions.get(&kernel) {
            return Ok(function);
        }
        let name = kernel.function();
        let absent = || fault(FaultKind::GpuKernel { device: self.label.clone(), kernel: kernel.function() });
        let image = images::holding(kernel).ok_or_else(absent)?;
        let code = image.code(self.description.architecture, self.prefer).ok_or_else(absent)?;
        let early = code.waits();
        let module = match state.modules.get(image.file) {
            Some(&module) => module,
            None => {
                let module = self.load(state, image.file, code)?;
                state.modules.insert(image.file, module);
                module
            }
        };
        let mut function = Handle::NULL;
        let symbol = CString::new(name.as_str()).expect("names of kernels have no 0");
        // SAFETY: the pointers are to local variables, the module is loaded.
        let code = unsafe { (self.api.cuModuleGetFunction)(&mut function, module, symbol.as_ptr()) };
        self.check_after(state, code, format!("find the kernel {name}"), "cuModuleGetFunction")?;
        if kernel.name.is_for_bricks() {
            let most = self.description.chosen_shared_bytes() as c_int;
            // SAFETY: the function was just found.
            let code = unsafe { (self.api.cuFuncSetAttribute)(function, api::FUNCTION_SHARED_BYTES, most) };
            self.check_after(state, code, format!("give shared memory to the kernel {name}"), "cuFuncSetAttribute")?;
        }
        let function = Function { handle: function, early };
        state.functions.insert(kernel, function);
        Ok(function)
    }

    /// Whether there is code of a kernel for the device.
    pub fn has(&self, kernel: Kernel) -> bool {
        images::holding(kernel).is_some_and(|image| image.code(self.description.architecture, self.prefer).is_some())
    }

    /// Groups of a kernel that run at the same time, each with so many bytes of shared memory; at least one.
    pub fn resident(&self, kernel: Kernel, shared_bytes: u32) -> Result<u32> {
        let mut state = self.begin()?;
        if let Some(&groups) = state.resident.get(&(kernel, shared_bytes)) {
            return Ok(groups);
        }
        let function = self.function(&mut state, kernel)?.handle;
        let (mut groups, threads) = (0, kernel.name.threads() as c_int);
        // SAFETY: the pointer is to a local variable, the function is loaded.
        let code = unsafe {
            let call = self.api.cuOccupancyMaxActiveBlocksPerMultiprocessor;
            call(&mut groups, function, threads, shared_bytes as usize)
        };
        let doing = || format!("ask how many groups of the kernel {} run together", kernel.function());
        self.check_after(&mut state, code, doing(), "cuOccupancyMaxActiveBlocksPerMultiprocessor")?;
        let groups = u32::try_from(groups).unwrap_or(0).max(1) * self.description.multiprocessors;
        state.resident.insert((kernel, shared_bytes), groups);
        Ok(groups)
    }

    fn load(&self, state: &mut State, file: &str, code: Code) -> Result<Handle> {
        let bytes = match code {
            Code::Cubin(_, bytes) => bytes,
            Code::Ptx(_, text) => text.as_bytes(),
        };
        // Aligned as machine code is, and with a 0 after the text.
        let mut image = vec![0u64; bytes.len() / 8 + 1];
        let mut module = Handle::NULL;
        // SAFETY: the vector has room for the bytes and a 0 after them; the driver copies what it needs of it.
        let result = unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), image.as_mut_ptr().cast(), bytes.len());
            (self.api.cuModuleLoadData)(&mut module, image.as_ptr().cast())
        };
        self.check_after(state, result, format!("load the kernels of {file}, {}", code.name()), "cuModuleLoadData")?;
        Ok(module)
    }
}

impl State {
    pub(super) fn stream(&self) -> Handle {
        self.stream.expect("it was made when the device was opened")
    }

    /// Notes kernels that were started.
    pub(super) fn was_launched(&mut self, count: u64, last: Kernel) {
        self.launched = Some((self.launched.map_or(0, |(before, _)| before) + count, last));
    }

    /// The staging buffer whose turn it is.
    fn turn(&mut self) -> Staging {
        self.staging.swap(0, 1);
        self.staging[1]
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter(&self.label).is_err() {
            return;
        }
        let state = std::mem::take(self.state.get_mut().unwrap_or_else(PoisonError::into_inner));
        // SAFETY: each was made once and goes once, after all that uses it has been done.
        unsafe {
            if let Some(stream) = state.stream {
                (self.api.cuStreamSynchronize)(stream);
            }
            for &module in state.modules.values() {
                (self.api.cuModuleUnload)(module);
            }
        }
        if let Some(uploads) = &state.uploads {
            self.free_uploads(uploads);
        }
        self.free_staging(&state.staging);
        if let Some(stream) = state.stream {
            // SAFETY: as above.
            unsafe { (self.api.cuStreamDestroy_v2)(stream) };
        }
    }
}
