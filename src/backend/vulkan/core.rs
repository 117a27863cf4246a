//! A device that is open: its queue, and the checks that every call's answer goes through.

use std::ffi::c_char;
#[cfg(test)]
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ash::vk;

use super::Options;
use super::adapter::{Adapter, LANES, MAX_BUFFERS};
use super::api::Api;
use super::faults::call_fault;
use super::matrices::Matrices;
use crate::backend::gpu::driver::DeviceMemory;
use crate::error::{Fault, FaultKind, Place, Result};

/// A device that is open. What is made on it holds it.
pub(super) struct Core {
    pub device: ash::Device,
    pub queue: vk::Queue,
    /// Where descriptors can be written into a command buffer.
    pub push: Option<ash::khr::push_descriptor::Device>,
    pub adapter: Adapter,
    /// Whether kernels add up lanes by subgroups.
    pub subgroups: bool,
    /// What products of the fast mode are made of, if there are any.
    pub matrices: Option<Matrices>,
    /// Of one buffer, in bytes.
    pub buffer_bytes: u64,
    /// The number of the submission that is being recorded, and of the last that is done.
    pub recording: AtomicU64,
    pub done: AtomicU64,
    /// Whether the device may use what was made on it for ever: then it is left to the end of the process.
    pub abandoned: AtomicBool,
    validation: bool,
    /// A call that is to fail next.
    #[cfg(test)]
    pub failing: Mutex<Option<(&'static str, vk::Result)>>,
    // Dropped last.
    pub api: Api,
}

impl Core {
    /// Opens a device.
    pub fn open(api: Api, adapter: Adapter, options: &Options) -> Result<Core> {
        let mut extensions: Vec<*const c_char> = Vec::new();
        let subgroups = options.subgroups.unwrap_or(adapter.subgroup_lanes >= LANES) && adapter.subgroup_lanes > 0;
        let pushes = options.push_descriptors && adapter.push_descriptors;
        if pushes {
            extensions.push(ash::khr::push_descriptor::NAME.as_ptr());
        }
        let matrices = adapter.matrices.filter(|_| options.matrices);
        let full = subgroups || matrices.is_some();
        if full {
            extensions.push(ash::ext::subgroup_size_control::NAME.as_ptr());
        }
        if matrices.is_some() {
            let names = [
                ash::khr::cooperative_matrix::NAME,
                ash::khr::shader_float16_int8::NAME,
                ash::khr::vulkan_memory_model::NAME,
            ];
            extensions.extend(names.map(|name| name.as_ptr()));
        }
        if adapter.memory_budget {
            extensions.push(ash::ext::memory_budget::NAME.as_ptr());
        }
        if adapter.is_portability {
            extensions.push(ash::khr::portability_subset::NAME.as_ptr());
        }
        let queues = [vk::DeviceQueueCreateInfo::default().queue_family_index(adapter.family).queue_priorities(&[1.0])];
        let mut info = vk::DeviceCreateInfo::default().queue_create_infos(&queues).enabled_extension_names(&extensions);
        let mut full_subgroups = vk::PhysicalDeviceSubgroupSizeControlFeatures::default().compute_full_subgroups(true);
        let mut of_matrices = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default().cooperative_matrix(true);
        let mut of_halves = vk::PhysicalDeviceShaderFloat16Int8Features::default().shader_float16(true);
        let mut of_model = vk::PhysicalDeviceVulkanMemoryModelFeatures::default()
            .vulkan_memory_model(true)
            .vulkan_memory_model_device_scope(true);
        if full {
            info = info.push_next(&mut full_subgroups);
        }
        if matrices.is_some() {
            info = info.push_next(&mut of_matrices).push_next(&mut of_halves).push_next(&mut of_model);
        }
        // SAFETY: the device has the queue family and offers the extensions; `info` points to what lives until the end.
        let device = unsafe { api.instance.create_device(adapter.physical, &info, None) }
            .map_err(|error| call_fault(&adapter.name, "vkCreateDevice", "open the device".to_owned(), error))?;
        // SAFETY: the device was made with one queue of this family.
        let queue = unsafe { device.get_device_queue(adapter.family, 0) };
        let push = pushes.then(|| ash::khr::push_descriptor::Device::new(&api.instance, &device));
        Ok(Core {
            device,
            queue,
            push,
            buffer_bytes: adapter.limits.buffer_bytes.min(options.buffer_bytes) / 256 * 256,
            subgroups,
            matrices,
            adapter,
            recording: AtomicU64::new(1),
            done: AtomicU64::new(0),
            abandoned: AtomicBool::new(false),
            validation: options.validation,
            #[cfg(test)]
            failing: Mutex::new(None),
            api,
        })
    }

    /// A call's answer, or the fault that names it.
    pub fn check<T>(&self, call: &'static str, doing: impl Fn() -> String, answer: Result<T, vk::Result>) -> Result<T> {
        let fault = |error| call_fault(&self.adapter.name, call, doing(), error);
        #[cfg(test)]
        if let Some((_, error)) = self.failing.lock().unwrap().take_if(|(failing, _)| *failing == call) {
            return Err(fault(error));
        }
        answer.map_err(fault)
    }

    /// Refuses to go on when the validation layers have said something.
    pub fn validate(&self, doing: impl Fn() -> String) -> Result<()> {
        if !self.validation {
            return Ok(());
        }
        let messages = self.api.messages();
        if messages.is_empty() {
            return Ok(());
        }
        let (device, message) = (self.adapter.name.clone(), messages.join("\n"));
        Err(Fault::new(Place::default(), FaultKind::GpuValidation { device, doing: doing(), message }))
    }

    /// A type of memory among those of `bits`: the first list of properties that one has, and has not.
    pub fn memory_type(
        &self,
        bits: u32,
        wishes: &[(vk::MemoryPropertyFlags, vk::MemoryPropertyFlags)],
    ) -> Option<usize> {
        let types = self.adapter.memory.memory_types_as_slice();
        wishes.iter().find_map(|&(has, has_not)| {
            types.iter().enumerate().position(|(at, kind)| {
                bits & (1 << at) != 0 && kind.property_flags.contains(has) && !kind.property_flags.intersects(has_not)
            })
        })
    }

    /// Memory of a heap, of which this program holds `held` bytes.
    pub fn heap(&self, heap: u32, held: u64) -> DeviceMemory {
        let total = self.adapter.memory.memory_heaps[heap as usize].size;
        if !self.adapter.memory_budget {
            return DeviceMemory { free: total.saturating_sub(held), total };
        }
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut memory = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: the device speaks Vulkan 1.1 and has the extension of the structure.
        unsafe { self.api.instance.get_physical_device_memory_properties2(self.adapter.physical, &mut memory) };
        let at = heap as usize;
        let free = budget.heap_budget[at].saturating_sub(budget.heap_usage[at]);
        DeviceMemory { free: free.min(total.saturating_sub(held)), total }
    }

    /// The number of the submission that is being recorded.
    pub fn now(&self) -> u64 {
        self.recording.load(Ordering::Acquire)
    }

    /// Memory with a buffer that is all of it.
    pub fn make_block(
        &self,
        bytes: u64,
        usage: vk::BufferUsageFlags,
        wishes: &[(vk::MemoryPropertyFlags, vk::MemoryPropertyFlags)],
        purpose: &str,
    ) -> Result<Block> {
        let doing = || format!("make a buffer of {bytes} bytes for {purpose}");
        let info = vk::BufferCreateInfo::default().size(bytes).usage(usage);
        // SAFETY: the device is alive, here and below.
        let answer = unsafe { self.device.create_buffer(&info, None) };
        let buffer = self.check("vkCreateBuffer", doing, answer)?;
        let mut block = Block { buffer, memory: vk::DeviceMemory::null(), bytes, heap: 0 };
        let made = self.fill(&mut block, wishes, &doing);
        if made.is_err() {
            // SAFETY: nothing uses it yet.
            unsafe { self.destroy_block(&block) };
        }
        made.map(|()| block)
    }

    fn fill(
        &self,
        block: &mut Block,
        wishes: &[(vk::MemoryPropertyFlags, vk::MemoryPropertyFlags)],
        doing: &impl Fn() -> String,
    ) -> Result<()> {
        // SAFETY: the buffer was just made.
        let needs = unsafe { self.device.get_buffer_memory_requirements(block.buffer) };
        let no_type = Err(vk::Result::ERROR_FEATURE_NOT_PRESENT);
        let kind = self.memory_type(needs.memory_type_bits, wishes).map_or(no_type, Ok);
        let kind = self.check("vkGetBufferMemoryRequirements", doing, kind)?;
        block.heap = self.adapter.memory.memory_types[kind].heap_index;
        let info = vk::MemoryAllocateInfo::default().allocation_size(needs.size).memory_type_index(kind as u32);
        // SAFETY: the type is one of the device's.
        let answer = unsafe { self.device.allocate_memory(&info, None) };
        block.memory = self.check("vkAllocateMemory", doing, answer)?;
        // SAFETY: the memory is as large as the buffer asks for, and neither is bound yet.
        let answer = unsafe { self.device.bind_buffer_memory(block.buffer, block.memory, 0) };
        self.check("vkBindBufferMemory", doing, answer)
    }

    /// Gives a block back.
    ///
    /// # Safety
    ///
    /// It is of this device, nothing uses it, and nothing will.
    pub unsafe fn destroy_block(&self, block: &Block) {
        // SAFETY: see above; a null handle is allowed.
        unsafe { self.device.destroy_buffer(block.buffer, None) };
        // SAFETY: as above.
        unsafe { self.device.free_memory(block.memory, None) };
    }

    /// What the descriptors of a kernel look like.
    pub fn bindings(buffers: usize) -> Vec<vk::DescriptorSetLayoutBinding<'static>> {
        assert!(buffers <= MAX_BUFFERS as usize, "{buffers} buffers of a kernel");
        let binding = |at| {
            vk::DescriptorSetLayoutBinding::default()
                .binding(at)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .descriptor_count(1)
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
        };
        (0..buffers as u32).map(binding).collect()
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // SAFETY: whatever was made on the device holds this value, so it is gone.
        unsafe { self.device.destroy_device(None) };
    }
}

/// Memory of the device with a buffer that is all of it.
#[derive(Debug, Default)]
pub(super) struct Block {
    pub buffer: vk::Buffer,
    pub memory: vk::DeviceMemory,
    pub bytes: u64,
    pub heap: u32,
}
