//! What stands in command buffers: kernels with what they need, and barriers.

use ash::vk;

use super::core::Core;
use super::memory::Part;
use super::pipelines::Ready;
use crate::backend::gpu::kernels::Kernel;
use crate::error::Result;

/// Commands that are being recorded, and the pool of their descriptors, which is null where none is needed.
pub(super) type Into = (vk::CommandBuffer, vk::DescriptorPool);

impl Core {
    /// Whatever was recorded or submitted before is done, and seen, before what comes next.
    pub fn barrier(&self, commands: vk::CommandBuffer, next: vk::AccessFlags) {
        let barrier = [vk::MemoryBarrier::default()
            .src_access_mask(vk::AccessFlags::SHADER_WRITE | vk::AccessFlags::TRANSFER_WRITE)
            .dst_access_mask(next)];
        let work = vk::PipelineStageFlags::COMPUTE_SHADER | vk::PipelineStageFlags::TRANSFER;
        let after = if next == vk::AccessFlags::HOST_READ { vk::PipelineStageFlags::HOST } else { work };
        let none = vk::DependencyFlags::empty();
        // SAFETY: the commands are being recorded.
        unsafe { self.device.cmd_pipeline_barrier(commands, work, after, none, &barrier, &[], &[]) };
    }

    /// A kernel, after everything before.
    pub fn dispatch(
        &self,
        into: Into,
        kernel: Kernel,
        ready: Ready,
        groups: [u32; 3],
        buffers: &[Part],
        constants: &[u32],
    ) -> Result<()> {
        let (commands, _) = into;
        self.barrier(commands, vk::AccessFlags::SHADER_READ | vk::AccessFlags::SHADER_WRITE);
        self.bind(into, kernel, ready, buffers)?;
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
    fn bind(&self, (commands, pool): Into, kernel: Kernel, ready: Ready, buffers: &[Part]) -> Result<()> {
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
