//! What stands in command buffers: kernels with what they need, and barriers.

use ash::vk;

use super::core::Core;
use super::hazards::{Hazards, Touched};
use super::memory::Part;
use super::pipelines::Ready;
use crate::backend::gpu::kernels::Kernel;
use crate::error::Result;

/// The stages of all that is done on the device.
const WORK: vk::PipelineStageFlags = vk::PipelineStageFlags::from_raw(
    vk::PipelineStageFlags::COMPUTE_SHADER.as_raw() | vk::PipelineStageFlags::TRANSFER.as_raw(),
);

/// Commands that are being recorded.
pub(super) struct Into<'h> {
    pub commands: vk::CommandBuffer,
    /// The pool of their descriptors, which is null where none is needed.
    pub descriptors: vk::DescriptorPool,
    /// What they touched.
    pub hazards: &'h mut Hazards,
}

impl Core {
    /// Whatever was recorded or submitted before is done, and seen, before kernels and copies that come next.
    pub fn barrier(&self, commands: vk::CommandBuffer) {
        use vk::AccessFlags as A;
        let next = A::SHADER_READ | A::SHADER_WRITE | A::TRANSFER_READ | A::TRANSFER_WRITE;
        self.barrier_before(commands, WORK, next);
    }

    /// The same before the host reads.
    pub fn barrier_before_host(&self, commands: vk::CommandBuffer) {
        self.barrier_before(commands, vk::PipelineStageFlags::HOST, vk::AccessFlags::HOST_READ);
    }

    fn barrier_before(&self, commands: vk::CommandBuffer, after: vk::PipelineStageFlags, next: vk::AccessFlags) {
        let barrier = [vk::MemoryBarrier::default()
            .src_access_mask(vk::AccessFlags::SHADER_WRITE | vk::AccessFlags::TRANSFER_WRITE)
            .dst_access_mask(next)];
        let none = vk::DependencyFlags::empty();
        // SAFETY: the commands are being recorded.
        unsafe { self.device.cmd_pipeline_barrier(commands, WORK, after, none, &barrier, &[], &[]) };
    }

    /// A kernel, after everything before that it needs or that needs what it changes.
    pub fn dispatch(
        &self,
        into: Into<'_>,
        kernel: Kernel,
        ready: Ready,
        groups: [u32; 3],
        buffers: &[Part],
        constants: &[u32],
    ) -> Result<()> {
        let Into { commands, descriptors, hazards } = into;
        if hazards.touch(touched(ready, buffers)) {
            self.barrier(commands);
        }
        self.bind((commands, descriptors), kernel, ready, buffers)?;
        let bytes: Vec<u8> = constants.iter().flat_map(|word| word.to_le_bytes()).collect();
        // SAFETY: the commands are being recorded, here and below; the layout has room for the constants.
        unsafe { self.device.cmd_bind_pipeline(commands, vk::PipelineBindPoint::COMPUTE, ready.pipeline) };
        if !bytes.is_empty() {
            // SAFETY: as above.
            unsafe {
                self.device.cmd_push_constants(commands, ready.layout, vk::ShaderStageFlags::COMPUTE, 0, &bytes);
            }
        }
        // SAFETY: as above; pipeline, descriptors and constants are bound.
        unsafe { self.device.cmd_dispatch(commands, groups[0], groups[1], groups[2]) };
        Ok(())
    }

    /// Tells the device where a kernel's buffers are.
    fn bind(
        &self,
        (commands, pool): (vk::CommandBuffer, vk::DescriptorPool),
        kernel: Kernel,
        ready: Ready,
        buffers: &[Part],
    ) -> Result<()> {
        let infos: Vec<[vk::DescriptorBufferInfo; 1]> = buffers
            .iter()
            .map(|part| [vk::DescriptorBufferInfo { buffer: part.buffer, offset: part.at, range: part.bytes }])
            .collect();
        let mut set = vk::DescriptorSet::null();
        if self.push.is_none() {
            let layouts = [ready.set];
            let info = vk::DescriptorSetAllocateInfo::default().descriptor_pool(pool).set_layouts(&layouts);
            // SAFETY: the pool is that of these commands and has room for all their launches.
            let answer = unsafe { self.device.allocate_descriptor_sets(&info) };
            let doing = || format!("run {}", kernel.function());
            set = self.check("vkAllocateDescriptorSets", doing, answer)?[0];
        }
        let writes: Vec<vk::WriteDescriptorSet<'_>> = (0..)
            .zip(&infos)
            .map(|(at, info)| {
                vk::WriteDescriptorSet::default()
                    .dst_set(set)
                    .dst_binding(at)
                    .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                    .buffer_info(info)
            })
            .collect();
        let point = vk::PipelineBindPoint::COMPUTE;
        match &self.push {
            Some(push) => {
                // SAFETY: the commands are being recorded, the layout was made for such descriptors.
                unsafe { push.cmd_push_descriptor_set(commands, point, ready.layout, 0, &writes) };
            }
            None => {
                // SAFETY: the set was just allocated, so the device does not use it.
                unsafe { self.device.update_descriptor_sets(&writes, &[]) };
                // SAFETY: the commands are being recorded, the set is of the layout's.
                unsafe { self.device.cmd_bind_descriptor_sets(commands, point, ready.layout, 0, &[set], &[]) };
            }
        }
        Ok(())
    }
}

/// The bytes that a kernel reads and those that it writes; whoever writes to a buffer may read there, too.
fn touched(ready: Ready, buffers: &[Part]) -> Touched {
    let mut touched = Touched::default();
    for (at, part) in buffers.iter().enumerate() {
        let bytes = (part.buffer, part.at..part.at + part.bytes);
        if ready.written >> at & 1 != 0 {
            touched.writes.push(bytes);
        } else {
            touched.reads.push(bytes);
        }
    }
    touched
}
