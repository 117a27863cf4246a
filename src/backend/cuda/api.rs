//! The driver's library: every function that is called, found before any is, and its errors by their names.
//!
//! The library is opened when it is asked for, never linked: the program starts where there is none. Signatures are those of
//! cuda.h of CUDA 12.2, under the names to which it maps them (`_v2`).

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::error::{Fault, FaultKind, Place, Result};

/// The library's name where users look for it.
const LIBRARY: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };

/// A context, stream, event, module or function of the driver's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Handle(pub *mut c_void);

// SAFETY: the driver takes its handles on any thread; what orders the calls is the lock of `stream::Stream`.
unsafe impl Send for Handle {}
// SAFETY: as above; a handle is a number to this program, which never reads what it points to.
unsafe impl Sync for Handle {}

impl Handle {
    /// No handle.
    pub const NULL: Handle = Handle(std::ptr::null_mut());

    /// Whether there is none.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }
}

/// An address on the device.
pub(super) type Address = u64;

/// `CUDA_SUCCESS`
pub(super) const SUCCESS: u32 = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`
pub(super) const OUT_OF_MEMORY: u32 = 2;
/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`
pub(super) const PEER_ACCESS_ALREADY_ENABLED: u32 = 704;

/// `CU_DEVICE_ATTRIBUTE_…`, by the numbers of cuda.h.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)] // their names are cuda.h's
pub(super) enum Attribute {
    MaxGridDimX = 5,
    MaxGridDimY = 6,
    MaxGridDimZ = 7,
    Multiprocessors = 16,
    ComputeCapabilityMajor = 75,
    ComputeCapabilityMinor = 76,
    SharedBytes = 97,
}

/// `CU_STREAM_NON_BLOCKING`
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DEFAULT`
pub(super) const EVENT_DEFAULT: c_uint = 0;
/// `CU_EVENT_DISABLE_TIMING`
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: memory may be taken, and modules loaded, while launches are recorded.
pub(super) const STREAM_CAPTURE_MODE_RELAXED: c_int = 2;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub(super) const FUNCTION_SHARED_BYTES: c_int = 8;
/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: the kernel may begin before the one before it has ended.
pub(super) const LAUNCH_EARLY: c_uint = 6;

/// `CUlaunchAttribute`.
#[repr(C)]
pub(super) struct LaunchAttribute {
    pub id: c_uint,
    pub padding: [u8; 4],
    /// A union of 64 bytes.
    pub value: [u64; 8],
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    pub groups: [c_uint; 3],
    pub threads: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: Handle,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: c_uint,
}

macro_rules! api {
    ($($name:ident ( $($argument:ty),* );)*) => {
        /// The functions of the driver, under their own names.
        #[allow(non_snake_case)]
        pub(super) struct Api {
            $(pub $name: unsafe extern "system" fn($($argument),*) -> u32,)*
        }

        impl Api {
            /// Looks up every function of a library that stays loaded.
            fn of(library: &'static libloading::Library) -> Result<Api> {
                Ok(Api {
                    $($name: {
                        let symbol = concat!(stringify!($name), "\0");
                        // SAFETY: the function has this signature in cuda.h since CUDA 11, and the library is never closed.
                        let found = unsafe {
                            library.get::<unsafe extern "system" fn($($argument),*) -> u32>(symbol.as_bytes())
                        };
                        *found.map_err(|_| {
                            fault(FaultKind::GpuSymbol { api: "CUDA", symbol: stringify!($name) })
                        })?
                    },)*
                })
            }
        }
    };
}

api! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuGetErrorName(u32, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut c_int, c_int);
    cuDeviceGetName(*mut c_char, c_int, c_int);
    cuDeviceGetAttribute(*mut c_int, c_int, c_int);
    cuDeviceTotalMem_v2(*mut usize, c_int);
    cuDevicePrimaryCtxRetain(*mut Handle, c_int);
    cuDevicePrimaryCtxRelease_v2(c_int);
    cuCtxSetCurrent(Handle);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut Address, usize);
    cuMemFree_v2(Address);
    cuMemAllocHost_v2(*mut *mut c_void, usize);
    cuMemFreeHost(*mut c_void);
    cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, Handle);
    cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, Handle);
    cuMemcpyDtoDAsync_v2(Address, Address, usize, Handle);
    cuMemcpyPeerAsync(Address, Handle, Address, Handle, usize, Handle);
    cuDeviceCanAccessPeer(*mut c_int, c_int, c_int);
    cuCtxEnablePeerAccess(Handle, c_uint);
    cuStreamCreate(*mut Handle, c_uint);
    cuStreamDestroy_v2(Handle);
    cuStreamSynchronize(Handle);
    cuStreamWaitEvent(Handle, Handle, c_uint);
    cuEventCreate(*mut Handle, c_uint);
    cuEventDestroy_v2(Handle);
    cuEventRecord(Handle, Handle);
    cuEventSynchronize(Handle);
    cuEventElapsedTime(*mut f32, Handle, Handle);
    cuStreamBeginCapture_v2(Handle, c_int);
    cuStreamEndCapture(Handle, *mut Handle);
    cuGraphInstantiateWithFlags(*mut Handle, Handle, u64);
    cuGraphLaunch(Handle, Handle);
    cuGraphDestroy(Handle);
    cuGraphExecDestroy(Handle);
    cuModuleLoadData(*mut Handle, *const c_void);
    cuModuleUnload(Handle);
    cuModuleGetFunction(*mut Handle, Handle, *const c_char);
    cuFuncSetAttribute(Handle, c_int, c_int);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, Handle, c_int, usize);
    cuLaunchKernelEx(*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void);
    cuLaunchKernel(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Api")
    }
}

impl Api {
    /// The driver of this machine, initialized.
    pub fn get() -> Result<&'static Api> {
        static API: OnceLock<Api> = OnceLock::new();
        let api = match API.get() {
            Some(api) => api,
            None => {
                let api = Api::of(library()?)?;
                API.get_or_init(|| api)
            }
        };
        // SAFETY: cuInit takes no pointer, and may be called any number of times.
        api.check(unsafe { (api.cuInit)(0) }, || Call::new("CUDA", "start the driver", "cuInit"))?;
        Ok(api)
    }

    /// A code by its name and number.
    pub fn code(&self, code: u32) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the pointer is to a local variable; any number may be asked for.
        let known = unsafe { (self.cuGetErrorName)(code, &mut name) };
        if known != SUCCESS || name.is_null() {
            return format!("{code}, a code that this driver has no name for");
        }
        // SAFETY: the driver gives a string of its own that ends with 0 and is never freed.
        let name = unsafe { CStr::from_ptr(name) };
        format!("{} ({code})", name.to_string_lossy())
    }

    /// `Ok` for success; else the fault of a call.
    pub fn check(&self, code: u32, call: impl FnOnce() -> Call) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let Call { device, doing, call, launched } = call();
        Err(fault(FaultKind::GpuCall { device, doing, call, code: self.code(code), launched }))
    }
}

/// What was being done when a call failed.
pub(super) struct Call {
    device: String,
    doing: String,
    call: &'static str,
    launched: Option<(u64, String)>,
}

impl Call {
    /// A call for a device; `doing` completes "cannot …".
    pub fn new(device: &str, doing: impl Into<String>, call: &'static str) -> Call {
        Call { device: device.to_owned(), doing: doing.into(), call, launched: None }
    }

    /// The same, after kernels whose errors may show here: how many, and the last.
    pub fn after(self, launched: Option<(u64, String)>) -> Call {
        Call { launched, ..self }
    }
}

/// A fault without a file.
pub(super) fn fault(kind: FaultKind) -> Fault {
    Fault::new(Place::default(), kind)
}

/// The driver's library, opened.
fn library() -> Result<&'static libloading::Library> {
    // SAFETY: opening NVIDIA's driver runs its initializers, which nothing here interferes with.
    if unsafe { cudarc::driver::sys::is_culib_present() } {
        // SAFETY: as above; it panics only where there is no library.
        return Ok(unsafe { cudarc::driver::sys::culib() });
    }
    // SAFETY: as above.
    let message = match unsafe { libloading::Library::new(LIBRARY) } {
        Ok(_) => "it was found at the second attempt only".to_owned(),
        // What the system says stands behind what was tried.
        Err(error) => std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string),
    };
    Err(fault(FaultKind::GpuLibrary { api: "CUDA", library: LIBRARY, message }))
}
