//! The GPUs that the driver knows, before anything of them is used.

use std::ffi::{CStr, c_char, c_int};

use super::api::{Api, Attribute, Call, Handle, fault};
use super::images::OLDEST;
use super::peers::can_access;
use crate::backend::gpu::driver::DeviceMemory;
use crate::error::{FaultKind, Result};

/// Bytes of shared memory that kernels which choose some have beside them, at most.
const OWN_SHARED_BYTES: u32 = 32 << 10;

/// A GPU as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Its number in the driver's order.
    pub ordinal: usize,
    /// The product's name.
    pub name: String,
    /// Compute capability: 86 for 8.6.
    pub architecture: u32,
    /// Its memory, in bytes.
    pub total: u64,
    /// The version of CUDA that the driver has: 12020 for 12.2.
    pub driver: u32,
    /// Groups of a launch in each dimension, at most.
    pub groups: [u32; 3],
    /// Its multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory of a group, at most.
    pub shared_bytes: u32,
}

impl Description {
    /// `8.6`
    pub fn capability(&self) -> String {
        format!("{}.{}", self.architecture / 10, self.architecture % 10)
    }

    /// Bytes of shared memory whose number a launch can choose: what is left beside those that kernels always have.
    pub fn chosen_shared_bytes(&self) -> u32 {
        self.shared_bytes.saturating_sub(OWN_SHARED_BYTES)
    }

    /// `12.2`
    pub fn cuda(&self) -> String {
        format!("{}.{}", self.driver / 1000, self.driver % 1000 / 10)
    }

    /// Name, number and driver for messages: `NVIDIA H200 (cuda:0, driver of CUDA 13.0)`.
    pub fn label(&self) -> String {
        format!("{} (cuda:{}, driver of CUDA {})", self.name, self.ordinal, self.cuda())
    }

    /// `Ok` if the kernels are made for such a device.
    pub fn usable(&self) -> Result<()> {
        if self.architecture >= OLDEST {
            return Ok(());
        }
        let (what, found, expected) = ("its compute capability", self.capability(), "7.5 (Turing)");
        Err(fault(FaultKind::GpuTooOld { device: self.label(), what, found, expected }))
    }
}

/// Every GPU there is; a driver without one is a fault.
pub fn list() -> Result<Vec<Description>> {
    let api = Api::get()?;
    (0..count(api)?).map(|ordinal| describe(api, ordinal).map(|(description, _)| description)).collect()
}

/// How many there are.
fn count(api: &Api) -> Result<usize> {
    let mut count: c_int = 0;
    // SAFETY: the pointer is to a local variable.
    let code = unsafe { (api.cuDeviceGetCount)(&mut count) };
    api.check(code, || Call::new("CUDA", "count the devices", "cuDeviceGetCount"))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// The GPU of that number, with the driver's own number for it.
pub(super) fn describe(api: &Api, ordinal: usize) -> Result<(Description, c_int)> {
    let found = count(api)?;
    let asked = c_int::try_from(ordinal).ok().filter(|_| ordinal < found);
    let Some(asked) = asked else {
        return Err(fault(FaultKind::GpuOrdinal { api: "cuda", asked: ordinal, found }));
    };
    let who = format!("cuda:{ordinal}");
    let call = |doing: &str, name| Call::new(&who, doing, name);
    let mut device: c_int = 0;
    // SAFETY: the pointer is to a local variable.
    api.check(unsafe { (api.cuDeviceGet)(&mut device, asked) }, || call("find the device", "cuDeviceGet"))?;
    let mut name = [0u8; 256];
    // SAFETY: the driver writes at most the bytes it is told, with a 0 at the end.
    let code = unsafe { (api.cuDeviceGetName)(name.as_mut_ptr().cast::<c_char>(), name.len() as c_int, device) };
    api.check(code, || call("ask for its name", "cuDeviceGetName"))?;
    let name = CStr::from_bytes_until_nul(&name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut total = 0usize;
    // SAFETY: the pointer is to a local variable.
    let code = unsafe { (api.cuDeviceTotalMem_v2)(&mut total, device) };
    api.check(code, || call("ask for its memory", "cuDeviceTotalMem_v2"))?;
    let mut driver: c_int = 0;
    // SAFETY: the pointer is to a local variable.
    let code = unsafe { (api.cuDriverGetVersion)(&mut driver) };
    api.check(code, || call("ask for the driver's version", "cuDriverGetVersion"))?;
    let attribute = |attribute: Attribute| {
        let mut value: c_int = 0;
        // SAFETY: the pointer is to a local variable.
        let code = unsafe { (api.cuDeviceGetAttribute)(&mut value, attribute as c_int, device) };
        api.check(code, || call("ask for its attributes", "cuDeviceGetAttribute"))?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    let (major, minor) = (attribute(Attribute::ComputeCapabilityMajor)?, attribute(Attribute::ComputeCapabilityMinor)?);
    let groups = [Attribute::MaxGridDimX, Attribute::MaxGridDimY, Attribute::MaxGridDimZ];
    let groups = [attribute(groups[0])?, attribute(groups[1])?, attribute(groups[2])?];
    let multiprocessors = attribute(Attribute::Multiprocessors)?;
    let shared_bytes = attribute(Attribute::SharedBytes)?;
    let driver = u32::try_from(driver).unwrap_or(0);
    let architecture = major * 10 + minor;
    let total = total as u64;
    let found = Description { ordinal, name, architecture, total, driver, groups, multiprocessors, shared_bytes };
    Ok((found, device))
}

/// A context of a device that is kept: the primary one, which all of the process share.
#[derive(Debug)]
pub(super) struct Context {
    api: &'static Api,
    device: c_int,
    handle: Handle,
}

impl Context {
    /// Takes it, or makes it.
    pub fn of(api: &'static Api, device: c_int, label: &str) -> Result<Context> {
        let mut handle = Handle::NULL;
        // SAFETY: the pointer is to a local variable, the device is the driver's own number.
        let code = unsafe { (api.cuDevicePrimaryCtxRetain)(&mut handle, device) };
        api.check(code, || Call::new(label, "make a context", "cuDevicePrimaryCtxRetain"))?;
        Ok(Context { api, device, handle })
    }

    /// The driver's own number of its device.
    pub fn device(&self) -> c_int {
        self.device
    }

    /// The handle, for copies between devices.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// Makes it what calls of this thread are about.
    pub fn enter(&self, label: &str) -> Result<()> {
        // SAFETY: the context is there as long as `self` is.
        let code = unsafe { (self.api.cuCtxSetCurrent)(self.handle) };
        self.api.check(code, || Call::new(label, "use the context", "cuCtxSetCurrent"))
    }

    /// Memory of its device; the context has been entered.
    pub fn memory(&self, label: &str) -> Result<DeviceMemory> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the pointers are to local variables.
        let code = unsafe { (self.api.cuMemGetInfo_v2)(&mut free, &mut total) };
        self.api.check(code, || Call::new(label, "ask for free memory", "cuMemGetInfo_v2"))?;
        Ok(DeviceMemory { free: free as u64, total: total as u64 })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once by `of`; whoever used it has gone before.
        unsafe { (self.api.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

/// Memory that is free on a device: a context is made to ask.
pub fn memory(ordinal: usize) -> Result<DeviceMemory> {
    let api = Api::get()?;
    let (description, device) = describe(api, ordinal)?;
    let label = description.label();
    let context = Context::of(api, device, &label)?;
    context.enter(&label)?;
    context.memory(&label)
}

/// GPUs whose memory a device can read by itself, by their numbers in the driver's order.
pub fn peers(ordinal: usize) -> Result<Vec<usize>> {
    let api = Api::get()?;
    let (description, device) = describe(api, ordinal)?;
    let mut peers = Vec::new();
    for other in (0..count(api)?).filter(|&other| other != ordinal) {
        let (_, peer) = describe(api, other)?;
        if can_access(api, &description.label(), device, peer)? {
            peers.push(other);
        }
    }
    Ok(peers)
}
