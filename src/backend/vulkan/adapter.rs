//! What a device is and has, read from it before it is used.

use std::ffi::CStr;
use std::fmt;

use ash::vk;

use super::api::{self, Api, has, version_text};
use super::faults::{api_fault, code};
use super::matrices::Matrices;
use crate::backend::gpu::driver::Limits;
use crate::error::{Fault, FaultKind, Place, Result};

/// Most buffers of a kernel.
pub(super) const MAX_BUFFERS: u32 = 6;
/// Bytes of constants of a kernel at most: what every device has.
pub(super) const CONSTANT_BYTES: u32 = 128;
/// Threads of a group at most.
const GROUP_THREADS: u32 = 256;
/// Lanes of a warp, as kernels count them.
pub(super) const LANES: u32 = 32;
/// Bytes that a group shares at most: what every device has.
const SHARED_BYTES: u32 = 16 << 10;

/// A device as it describes itself.
#[derive(Clone)]
pub struct Adapter {
    pub(super) physical: vk::PhysicalDevice,
    /// Its number in `vulkan:N`: the fastest kinds of device first, each in the order of the loader.
    pub ordinal: usize,
    /// Its name, number and driver for messages.
    pub name: String,
    /// The product's name.
    pub product: String,
    /// Its driver, with the version.
    pub driver: String,
    /// What kind of device it is.
    pub kind: Kind,
    /// The version of Vulkan that it speaks.
    pub version: String,
    /// What its kernels may do at most.
    pub limits: Limits,
    /// Bytes of memory of its own.
    pub memory_bytes: u64,
    /// Why it cannot be used, if it cannot.
    pub missing: Option<Missing>,
    pub(super) memory: vk::PhysicalDeviceMemoryProperties,
    pub(super) family: u32,
    /// Nanoseconds of one step of its clock; `None` if it has no clock.
    pub(super) tick: Option<f64>,
    pub(super) push_descriptors: bool,
    /// Lanes of a subgroup that can be asked to be full; 0 where subgroups cannot be used.
    pub(super) subgroup_lanes: u32,
    /// What products of the fast mode are made of.
    pub(super) matrices: Option<Matrices>,
    pub(super) memory_budget: bool,
    pub(super) is_portability: bool,
}

/// Kinds of devices, the fastest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
#[allow(missing_docs)] // the words say it
pub enum Kind {
    Discrete,
    Integrated,
    Virtual,
    Other,
    Software,
}

/// What a device lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// What is too little.
    pub what: &'static str,
    /// How much is needed.
    pub expected: String,
    /// How much there is.
    pub found: String,
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Adapter { ordinal, name, kind, version, limits, memory_bytes, missing, .. } = self;
        let mut out = f.debug_struct("Adapter");
        out.field("ordinal", ordinal).field("name", name).field("kind", kind).field("version", version);
        out.field("limits", limits).field("memory_bytes", memory_bytes).field("missing", missing);
        out.finish_non_exhaustive()
    }
}

impl Adapter {
    /// Which of the kernels it runs: with sums by subgroups, or through shared memory; with those of the fast mode, or without.
    pub fn kernels(&self) -> String {
        let subgroups = (self.subgroup_lanes >= LANES).then(|| "subgroups".to_owned());
        let matrices = self.matrices.map(|of| format!("cooperative matrices of {} × {} × {}", of.m, of.n, of.k));
        match subgroups.into_iter().chain(matrices).collect::<Vec<_>>().join(" and ") {
            with if with.is_empty() => "SPIR-V 1.3".to_owned(),
            with => format!("SPIR-V 1.3 with {with}"),
        }
    }

    /// Refuses a device that lacks something.
    pub fn usable(&self) -> Result<()> {
        let Some(Missing { what, expected, found }) = self.missing.clone() else { return Ok(()) };
        let device = self.name.clone();
        Err(Fault::new(Place::default(), FaultKind::GpuLacks { device, what, expected, found }))
    }
}

/// Every device that the drivers show, usable or not.
pub(super) fn all(api: &Api) -> Result<Vec<Adapter>> {
    // SAFETY: the instance is alive.
    let found = unsafe { api.instance.enumerate_physical_devices() }
        .map_err(|error| api_fault(format!("vkEnumeratePhysicalDevices: {}", code(error))))?;
    let mut adapters: Vec<Adapter> = found.into_iter().map(|physical| describe(api, physical)).collect();
    adapters.sort_by_key(|adapter| adapter.kind);
    for (ordinal, adapter) in adapters.iter_mut().enumerate() {
        adapter.ordinal = ordinal;
        adapter.name = format!("{} (vulkan:{ordinal}, {})", adapter.product, adapter.driver);
    }
    Ok(adapters)
}

/// The device with a number.
pub(super) fn find(api: &Api, ordinal: usize) -> Result<Adapter> {
    let adapters = all(api)?;
    let found = adapters.len();
    let absent = || Fault::new(Place::default(), FaultKind::GpuOrdinal { api: "vulkan", asked: ordinal, found });
    let adapter = adapters.get(ordinal).cloned().ok_or_else(absent)?;
    adapter.usable()?;
    Ok(adapter)
}

fn describe(api: &Api, physical: vk::PhysicalDevice) -> Adapter {
    let instance = &api.instance;
    // SAFETY: the device is one of the instance's, here and in the calls below.
    let properties = unsafe { instance.get_physical_device_properties(physical) };
    // SAFETY: as above.
    let offered = unsafe { instance.enumerate_device_extension_properties(physical) }.unwrap_or_default();
    // SAFETY: as above.
    let memory = unsafe { instance.get_physical_device_memory_properties(physical) };
    // SAFETY: as above.
    let families = unsafe { instance.get_physical_device_queue_family_properties(physical) };
    let family = families.iter().position(|family| family.queue_flags.contains(vk::QueueFlags::COMPUTE));
    let limits = properties.limits;
    let has_clock = family.is_some_and(|family| families[family].timestamp_valid_bits > 0);
    let (driver, largest) = if properties.api_version < api::VERSION {
        (format!("driver {}", properties.driver_version), 0)
    } else {
        more(instance, physical, &properties, &offered)
    };
    let subgroup_lanes = subgroup_lanes(instance, physical, properties.api_version, &offered);
    Adapter {
        physical,
        ordinal: 0,
        name: String::new(),
        product: device_name(&properties),
        driver,
        kind: kind(properties.device_type),
        version: version_text(properties.api_version),
        limits: Limits {
            shared_bytes: 0,
            buffer_bytes: largest.min(u64::from(limits.max_storage_buffer_range)) / 256 * 256,
            groups: limits.max_compute_work_group_count,
        },
        memory_bytes: own_memory(&memory),
        missing: missing(&properties, family.is_some()),
        memory,
        family: family.unwrap_or(0) as u32,
        tick: has_clock.then_some(f64::from(limits.timestamp_period)),
        subgroup_lanes,
        matrices: Matrices::of(api, physical, &properties, &offered, subgroup_lanes),
        push_descriptors: has(&offered, ash::khr::push_descriptor::NAME),
        memory_budget: has(&offered, ash::ext::memory_budget::NAME),
        is_portability: has(&offered, ash::khr::portability_subset::NAME),
    }
}

/// The driver with its version, and the largest buffer that one allocation can hold.
fn more(
    instance: &ash::Instance,
    physical: vk::PhysicalDevice,
    properties: &vk::PhysicalDeviceProperties,
    offered: &[vk::ExtensionProperties],
) -> (String, u64) {
    let has_driver = properties.api_version >= vk::API_VERSION_1_2 || has(offered, ash::khr::driver_properties::NAME);
    let has_largest = properties.api_version >= vk::API_VERSION_1_3 || has(offered, ash::khr::maintenance4::NAME);
    let mut driver = vk::PhysicalDeviceDriverProperties::default();
    let mut allocations = vk::PhysicalDeviceMaintenance3Properties::default();
    let mut buffers = vk::PhysicalDeviceMaintenance4Properties::default();
    let mut all = vk::PhysicalDeviceProperties2::default().push_next(&mut allocations);
    if has_driver {
        all = all.push_next(&mut driver);
    }
    if has_largest {
        all = all.push_next(&mut buffers);
    }
    // SAFETY: the device speaks Vulkan 1.1, and knows every structure of the chain.
    unsafe { instance.get_physical_device_properties2(physical, &mut all) };
    let name = match (driver.driver_name_as_c_str(), driver.driver_info_as_c_str()) {
        (Ok(name), Ok(info)) if has_driver => format!("{} {}", name.to_string_lossy(), info.to_string_lossy()),
        _ => format!("driver {}", properties.driver_version),
    };
    let largest = if has_largest { buffers.max_buffer_size } else { u64::MAX };
    (name, largest.min(allocations.max_memory_allocation_size))
}

/// Lanes of full subgroups that can be shuffled; 0 where the device has none.
fn subgroup_lanes(
    instance: &ash::Instance,
    physical: vk::PhysicalDevice,
    version: u32,
    offered: &[vk::ExtensionProperties],
) -> u32 {
    if version < api::VERSION || !has(offered, ash::ext::subgroup_size_control::NAME) {
        return 0;
    }
    let mut subgroups = vk::PhysicalDeviceSubgroupProperties::default();
    let mut all = vk::PhysicalDeviceProperties2::default().push_next(&mut subgroups);
    // SAFETY: the device speaks Vulkan 1.1, and knows the structure of the chain.
    unsafe { instance.get_physical_device_properties2(physical, &mut all) };
    let mut control = vk::PhysicalDeviceSubgroupSizeControlFeatures::default();
    let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut control);
    // SAFETY: as above, with the extension of the structure.
    unsafe { instance.get_physical_device_features2(physical, &mut features) };
    let does = vk::SubgroupFeatureFlags::BASIC | vk::SubgroupFeatureFlags::SHUFFLE;
    let usable = control.compute_full_subgroups == vk::TRUE
        && subgroups.supported_stages.contains(vk::ShaderStageFlags::COMPUTE)
        && subgroups.supported_operations.contains(does)
        && subgroups.subgroup_size <= GROUP_THREADS;
    if usable { subgroups.subgroup_size } else { 0 }
}

fn device_name(properties: &vk::PhysicalDeviceProperties) -> String {
    properties
        .device_name_as_c_str()
        .map(CStr::to_string_lossy)
        .unwrap_or("a device without a name".into())
        .into_owned()
}

fn kind(kind: vk::PhysicalDeviceType) -> Kind {
    match kind {
        vk::PhysicalDeviceType::DISCRETE_GPU => Kind::Discrete,
        vk::PhysicalDeviceType::INTEGRATED_GPU => Kind::Integrated,
        vk::PhysicalDeviceType::VIRTUAL_GPU => Kind::Virtual,
        vk::PhysicalDeviceType::CPU => Kind::Software,
        _ => Kind::Other,
    }
}

/// Bytes of the largest heap that is the device's own.
fn own_memory(memory: &vk::PhysicalDeviceMemoryProperties) -> u64 {
    let own = |heap: &&vk::MemoryHeap| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL);
    memory.memory_heaps_as_slice().iter().filter(own).map(|heap| heap.size).max().unwrap_or(0)
}

/// What every kernel takes for granted.
fn missing(properties: &vk::PhysicalDeviceProperties, computes: bool) -> Option<Missing> {
    let limits = &properties.limits;
    if properties.api_version < api::VERSION {
        let found = version_text(properties.api_version);
        return Some(Missing { what: "Vulkan", expected: "1.1".to_owned(), found });
    }
    if !computes {
        return Some(Missing { what: "compute queues", expected: "1".to_owned(), found: "none".to_owned() });
    }
    let needs = [
        ("threads of a group", GROUP_THREADS, limits.max_compute_work_group_invocations),
        ("threads of a group in x", GROUP_THREADS, limits.max_compute_work_group_size[0]),
        ("bytes that a group shares", SHARED_BYTES, limits.max_compute_shared_memory_size),
        ("buffers of a kernel", MAX_BUFFERS, limits.max_per_stage_descriptor_storage_buffers),
        ("bytes of push constants", CONSTANT_BYTES, limits.max_push_constants_size),
    ];
    needs.into_iter().find(|(_, expected, found)| found < expected).map(|(what, expected, found)| Missing {
        what,
        expected: expected.to_string(),
        found: found.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Properties of a device that has just what is needed.
    fn enough() -> vk::PhysicalDeviceProperties {
        let limits = vk::PhysicalDeviceLimits {
            max_compute_work_group_invocations: 256,
            max_compute_work_group_size: [256, 1, 1],
            max_compute_shared_memory_size: 16384,
            max_per_stage_descriptor_storage_buffers: 6,
            max_push_constants_size: 128,
            ..Default::default()
        };
        vk::PhysicalDeviceProperties { api_version: vk::API_VERSION_1_1, limits, ..Default::default() }
    }

    #[test]
    fn what_a_device_lacks_is_named() {
        let told = |change: fn(&mut vk::PhysicalDeviceProperties), computes| {
            let mut properties = enough();
            change(&mut properties);
            missing(&properties, computes).map(|m| format!("{}: expected {}, found {}", m.what, m.expected, m.found))
        };
        assert_eq!(told(|_| (), true), None);
        assert_eq!(told(|_| (), false).unwrap(), "compute queues: expected 1, found none");
        assert_eq!(
            told(|p| p.api_version = vk::make_api_version(0, 1, 0, 68), true).unwrap(),
            "Vulkan: expected 1.1, found 1.0.68"
        );
        assert_eq!(
            told(|p| p.limits.max_compute_work_group_invocations = 128, true).unwrap(),
            "threads of a group: expected 256, found 128"
        );
        assert_eq!(
            told(|p| p.limits.max_per_stage_descriptor_storage_buffers = 4, true).unwrap(),
            "buffers of a kernel: expected 6, found 4"
        );
    }
}
