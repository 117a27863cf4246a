//! Launches that are recorded once and done again and again: command buffers that submissions take in.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ash::vk;

use super::adapter::MAX_BUFFERS;
use super::commands::Into;
use super::core::Core;
use super::hazards::Hazards;
use super::memory::Part;
use super::pipelines::Ready;
use super::stream::MOST_LAUNCHES;
use super::{Held, Shared, locked};
use crate::backend::gpu::kernels::Kernel;
use crate::error::Result;

/// Launches that were recorded.
pub struct Recording {
    // Dropped first, after a wait.
    pub(super) recorded: Recorded,
    pub(super) shared: Arc<Shared>,
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording").field("portions", &self.recorded.portions.len()).finish_non_exhaustive()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // What is wrong with the device is told by whoever asks for something next.
        let _ = locked(&self.shared.stream).wait();
    }
}

/// Command buffers with what they use. Whoever drops it has waited for the device.
pub(super) struct Recorded {
    core: Arc<Core>,
    pool: vk::CommandPool,
    descriptors: Vec<vk::DescriptorPool>,
    portions: Vec<Portion>,
    /// Of the last portion.
    hazards: Hazards,
    /// Memory that the launches use.
    held: Vec<Arc<Held>>,
    /// Whether the last portion is still being recorded.
    open: bool,
}

/// Launches that one submission takes in whole.
#[derive(Debug, Clone, Copy)]
pub(super) struct Portion {
    pub commands: vk::CommandBuffer,
    pub first: Kernel,
    pub last: Kernel,
    pub launches: u32,
}

impl Recorded {
    /// Nothing yet.
    pub fn new(core: Arc<Core>) -> Result<Recorded> {
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(core.adapter.family);
        // SAFETY: the device is alive and has the family.
        let answer = unsafe { core.device.create_command_pool(&info, None) };
        let pool = core.check("vkCreateCommandPool", doing, answer)?;
        Ok(Recorded {
            core,
            pool,
            descriptors: Vec::new(),
            portions: Vec::new(),
            hazards: Hazards::default(),
            held: Vec::new(),
            open: false,
        })
    }

    /// Portions in their order.
    pub fn portions(&self) -> &[Portion] {
        &self.portions
    }

    /// Records a launch; a portion has at most `most`, as many as a submission may have now.
    pub fn launch(
        &mut self,
        most: u32,
        kernel: Kernel,
        ready: Ready,
        groups: [u32; 3],
        buffers: &[&Arc<Held>],
        constants: &[u32],
    ) -> Result<()> {
        if self.portions.last().is_some_and(|portion| portion.launches >= most) {
            self.close()?;
        }
        if !self.open {
            self.begin(kernel)?;
        }
        let portion = self.portions.last_mut().expect("one was begun");
        let pool = self.descriptors.last().copied().unwrap_or_default();
        let parts: Vec<Part> = buffers.iter().map(|held| held.part).collect();
        let into = Into { commands: portion.commands, descriptors: pool, hazards: &mut self.hazards };
        self.core.dispatch(into, kernel, ready, groups, &parts, constants)?;
        self.held.extend(buffers.iter().map(|&held| Arc::clone(held)));
        portion.last = kernel;
        portion.launches += 1;
        self.core.validate(|| format!("record {}", kernel.function()))
    }

    /// Begins a portion.
    fn begin(&mut self, first: Kernel) -> Result<()> {
        let core = &self.core;
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(self.pool)
            .level(vk::CommandBufferLevel::SECONDARY)
            .command_buffer_count(1);
        // SAFETY: the pool is this value's own.
        let answer = unsafe { core.device.allocate_command_buffers(&info) };
        let commands = core.check("vkAllocateCommandBuffers", doing, answer)?[0];
        if core.push.is_none() {
            let sizes = [vk::DescriptorPoolSize {
                ty: vk::DescriptorType::STORAGE_BUFFER,
                descriptor_count: MOST_LAUNCHES * MAX_BUFFERS,
            }];
            let info = vk::DescriptorPoolCreateInfo::default().max_sets(MOST_LAUNCHES).pool_sizes(&sizes);
            // SAFETY: the device is alive.
            let answer = unsafe { core.device.create_descriptor_pool(&info, None) };
            self.descriptors.push(core.check("vkCreateDescriptorPool", doing, answer)?);
        }
        let inherited = vk::CommandBufferInheritanceInfo::default();
        let info = vk::CommandBufferBeginInfo::default()
            .flags(vk::CommandBufferUsageFlags::SIMULTANEOUS_USE)
            .inheritance_info(&inherited);
        // SAFETY: the commands were just allocated.
        let answer = unsafe { core.device.begin_command_buffer(commands, &info) };
        core.check("vkBeginCommandBuffer", doing, answer)?;
        self.portions.push(Portion { commands, first, last: first, launches: 0 });
        self.hazards.forget();
        self.open = true;
        Ok(())
    }

    fn close(&mut self) -> Result<()> {
        let Some(portion) = self.portions.last().filter(|_| self.open) else { return Ok(()) };
        self.open = false;
        // SAFETY: the commands are being recorded.
        let answer = unsafe { self.core.device.end_command_buffer(portion.commands) };
        self.core.check("vkEndCommandBuffer", doing, answer)
    }

    /// The same when there is no more to record.
    pub fn ended(mut self) -> Result<Recorded> {
        self.close()?;
        Ok(self)
    }
}

fn doing() -> String {
    "record kernels".to_owned()
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if self.core.abandoned.load(Ordering::Acquire) {
            return;
        }
        for &pool in &self.descriptors {
            // SAFETY: the device is done with everything, by whoever drops this value; so below.
            unsafe { self.core.device.destroy_descriptor_pool(pool, None) };
        }
        // SAFETY: as above; the command buffers go with their pool.
        unsafe { self.core.device.destroy_command_pool(self.pool, None) };
    }
}
