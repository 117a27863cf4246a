//! Kernels made ready for the device, each when it is first asked for.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ash::vk;

use super::adapter::{CONSTANT_BYTES, MAX_BUFFERS};
use super::core::Core;
use super::spirv;
use crate::backend::gpu::kernels::Kernel;
use crate::error::{Fault, FaultKind, Place, Result};

/// Outputs that a warp takes at a time in products with so many rows of x: of one row few, so that there are groups for all of a
/// device; of several, x in shared memory is read less often the more there are.
pub(super) fn outputs(rows: u32) -> u32 {
    if rows == 1 { 2 } else { 4 }
}

/// Kernels that were made ready.
pub(super) struct Pipelines {
    core: Arc<Core>,
    /// By the number of buffers.
    layouts: Vec<(vk::DescriptorSetLayout, vk::PipelineLayout)>,
    made: HashMap<Kernel, (vk::Pipeline, u32)>,
}

/// A kernel that is ready.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ready {
    pub pipeline: vk::Pipeline,
    pub layout: vk::PipelineLayout,
    pub set: vk::DescriptorSetLayout,
    /// The buffers that it writes to, a bit each.
    pub written: u32,
}

impl Pipelines {
    /// None yet.
    pub fn new(core: Arc<Core>) -> Result<Pipelines> {
        let mut pipelines = Pipelines { core, layouts: Vec::new(), made: HashMap::new() };
        for buffers in 0..=MAX_BUFFERS as usize {
            pipelines.add_layout(buffers)?;
        }
        Ok(pipelines)
    }

    fn add_layout(&mut self, buffers: usize) -> Result<()> {
        let core = &self.core;
        let doing = || format!("describe kernels of {buffers} buffers");
        let bindings = Core::bindings(buffers);
        let push = vk::DescriptorSetLayoutCreateFlags::PUSH_DESCRIPTOR_KHR;
        let flags = if core.push.is_some() { push } else { vk::DescriptorSetLayoutCreateFlags::empty() };
        let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings).flags(flags);
        // SAFETY: the device is alive, here and below.
        let answer = unsafe { core.device.create_descriptor_set_layout(&info, None) };
        let set = core.check("vkCreateDescriptorSetLayout", doing, answer)?;
        let sets = [set];
        let constants =
            [vk::PushConstantRange { stage_flags: vk::ShaderStageFlags::COMPUTE, offset: 0, size: CONSTANT_BYTES }];
        let info = vk::PipelineLayoutCreateInfo::default().set_layouts(&sets).push_constant_ranges(&constants);
        // SAFETY: the layout of the set was just made.
        let answer = unsafe { core.device.create_pipeline_layout(&info, None) };
        let layout = core.check("vkCreatePipelineLayout", doing, answer);
        self.layouts.push((set, layout.as_ref().copied().unwrap_or_default()));
        layout.map(|_| ())
    }

    /// A kernel, made ready if it is not.
    pub fn get(&mut self, kernel: Kernel) -> Result<Ready> {
        let (set, layout) = self.layouts[kernel.name.buffers()];
        let (pipeline, written) = match self.made.get(&kernel) {
            Some(&made) => made,
            None => {
                let code = spirv::of(kernel, self.core.subgroups).ok_or_else(|| self.absent(kernel))?;
                let pipeline = self.make(kernel, code, layout)?;
                let made = (pipeline, spirv::written(code));
                self.made.insert(kernel, made);
                made
            }
        };
        Ok(Ready { pipeline, layout, set, written })
    }

    fn absent(&self, kernel: Kernel) -> Fault {
        let (device, kernel) = (self.core.adapter.name.clone(), kernel.function());
        Fault::new(Place::default(), FaultKind::GpuKernel { device, kernel })
    }

    /// Makes a kernel ready; constant 0 of its code is the rows of its tile, constant 1 the outputs of a warp; those of products of
    /// halves are followed by what their matrices are.
    fn make(&self, kernel: Kernel, code: &[u8], layout: vk::PipelineLayout) -> Result<vk::Pipeline> {
        let core = &self.core;
        let doing = || format!("make {} ready", kernel.function());
        let words: Vec<u32> =
            code.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
        let info = vk::ShaderModuleCreateInfo::default().code(&words);
        // SAFETY: the code is whole words of SPIR-V, validated when it was committed.
        let answer = unsafe { core.device.create_shader_module(&info, None) };
        let module = core.check("vkCreateShaderModule", doing, answer)?;
        let entry = |id: u32| vk::SpecializationMapEntry { constant_id: id, offset: 4 * id, size: 4 };
        let rows = kernel.rows.unwrap_or(1);
        let matrices = core.matrices.filter(|_| kernel.name.is_for_halves());
        let mut values = vec![rows, outputs(rows)];
        values.extend(matrices.map(|matrices| matrices.constants(rows)).unwrap_or_default());
        let entries: Vec<_> = (0..values.len() as u32).map(entry).collect();
        let values: Vec<u8> = values.into_iter().flat_map(u32::to_le_bytes).collect();
        let constants = vk::SpecializationInfo::default().map_entries(&entries).data(&values);
        let mut stage = vk::PipelineShaderStageCreateInfo::default()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(module)
            .name(c"main")
            .specialization_info(&constants);
        if core.subgroups || matrices.is_some() {
            stage.flags = vk::PipelineShaderStageCreateFlags::REQUIRE_FULL_SUBGROUPS_EXT;
        }
        let info = [vk::ComputePipelineCreateInfo::default().stage(stage).layout(layout)];
        // SAFETY: module and layout are of this device.
        let answer = unsafe { core.device.create_compute_pipelines(vk::PipelineCache::null(), &info, None) };
        // SAFETY: a pipeline does not need its module.
        unsafe { core.device.destroy_shader_module(module, None) };
        let made = core.check("vkCreateComputePipelines", doing, answer.map_err(|(_, error)| error))?;
        core.validate(doing)?;
        Ok(made[0])
    }
}

impl Drop for Pipelines {
    fn drop(&mut self) {
        if self.core.abandoned.load(Ordering::Acquire) {
            return;
        }
        for &(pipeline, _) in self.made.values() {
            // SAFETY: the stream, dropped before, has waited for whatever used it.
            unsafe { self.core.device.destroy_pipeline(pipeline, None) };
        }
        for &(set, layout) in &self.layouts {
            // SAFETY: as above; a null handle is allowed.
            unsafe { self.core.device.destroy_pipeline_layout(layout, None) };
            // SAFETY: as above.
            unsafe { self.core.device.destroy_descriptor_set_layout(set, None) };
        }
    }
}
