//! What the device is to do, in order: recorded, submitted in portions, waited for.
//!
//! A submission is recorded into one of a few frames, each with memory through which data goes to the device; while one is
//! done, the next is recorded and filled. A barrier stands before everything that needs what was before it, or changes what that
//! needs ([`Hazards`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ash::vk;

use super::Held;
use super::adapter::MAX_BUFFERS;
use super::commands::Into;
use super::core::{Block, Core};
use super::hazards::{Hazards, Touched};
use super::memory::Part;
use super::pipelines::Ready;
use super::recording::Recorded;
use crate::backend::gpu::driver::{Clock, Elapsed};
use crate::backend::gpu::kernels::Kernel;
use crate::error::{Fault, FaultKind, Place, Result};

/// Submissions that may be on their way.
const FRAMES: usize = 4;
/// Two marks of the time, after those of the frames.
const MARKS: u32 = 2 * FRAMES as u32;
/// Bytes of memory for data to the device, of each frame, and for data back.
const STAGING_BYTES: u64 = 8 << 20;
/// Most launches of a submission.
pub(super) const MOST_LAUNCHES: u32 = 64;
/// A submission that took longer is followed by smaller ones, one that took less than a quarter by larger ones.
const LONG: Duration = Duration::from_millis(100);

/// Work on its way to the device.
pub(super) struct Stream {
    core: Arc<Core>,
    pool: vk::CommandPool,
    queries: vk::QueryPool,
    frames: Vec<Frame>,
    /// The frame that is recorded into, or will be next.
    at: usize,
    staging: Staging,
    back: Staging,
    /// Launches that the next submission may have.
    launches: u32,
    /// How long to wait for a submission.
    patience: Duration,
    /// Launches that are recorded, while they are.
    recorded: Option<Recorded>,
    /// What ended everything.
    broken: Option<Broken>,
}

/// Memory that both the host and the device see.
struct Staging {
    block: Block,
    host: *mut u8,
}

impl Default for Staging {
    fn default() -> Staging {
        Staging { block: Block::default(), host: std::ptr::null_mut() }
    }
}

// SAFETY: the pointer is to memory that only its owner accesses, and not to anything of a thread.
unsafe impl Send for Staging {}

#[derive(Clone)]
enum Broken {
    Lost { call: &'static str, code: String, doing: String },
    Late { doing: String },
}

/// A submission.
#[derive(Default)]
struct Frame {
    commands: vk::CommandBuffer,
    fence: vk::Fence,
    descriptors: vk::DescriptorPool,
    state: State,
    /// Its number while it is submitted.
    serial: u64,
    staged: u64,
    first: Option<Kernel>,
    last: Option<Kernel>,
    launches: u32,
    copied: u64,
    hazards: Hazards,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum State {
    #[default]
    Idle,
    Recording,
    Submitted,
}

impl Frame {
    /// `12 kernels from rms_norm to add`.
    fn told(&self) -> String {
        let name = |kernel: Option<Kernel>| kernel.map(Kernel::function).unwrap_or_default();
        match (self.launches, self.copied) {
            (0, bytes) => format!("copy {bytes} bytes"),
            (1, _) => format!("run {}", name(self.last)),
            (count, _) => format!("run {count} kernels from {} to {}", name(self.first), name(self.last)),
        }
    }
}

impl Stream {
    /// Nothing to do yet.
    pub fn new(core: Arc<Core>, patience: Duration) -> Result<Stream> {
        let doing = || "open the device".to_owned();
        let info = vk::CommandPoolCreateInfo::default()
            .queue_family_index(core.adapter.family)
            .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER | vk::CommandPoolCreateFlags::TRANSIENT);
        // SAFETY: the device is alive and has the family.
        let answer = unsafe { core.device.create_command_pool(&info, None) };
        let pool = core.check("vkCreateCommandPool", doing, answer)?;
        let mut stream = Stream {
            core,
            pool,
            queries: vk::QueryPool::null(),
            frames: Vec::new(),
            at: 0,
            staging: Staging::default(),
            back: Staging::default(),
            launches: 1,
            patience,
            recorded: None,
            broken: None,
        };
        // From here on the stream gives back what it has, whatever fails.
        stream.prepare()?;
        Ok(stream)
    }

    fn prepare(&mut self) -> Result<()> {
        let doing = || "open the device".to_owned();
        let core = &self.core;
        if core.adapter.tick.is_some() {
            let info = vk::QueryPoolCreateInfo::default().query_type(vk::QueryType::TIMESTAMP).query_count(MARKS + 2);
            // SAFETY: the device is alive, here and below.
            let answer = unsafe { core.device.create_query_pool(&info, None) };
            self.queries = core.check("vkCreateQueryPool", doing, answer)?;
        }
        let info = vk::CommandBufferAllocateInfo::default().command_pool(self.pool).command_buffer_count(FRAMES as u32);
        // SAFETY: the pool was just made.
        let answer = unsafe { core.device.allocate_command_buffers(&info) };
        for commands in core.check("vkAllocateCommandBuffers", doing, answer)? {
            self.frames.push(Frame { commands, ..Frame::default() });
        }
        for frame in &mut self.frames {
            // SAFETY: as above.
            let answer = unsafe { core.device.create_fence(&vk::FenceCreateInfo::default(), None) };
            frame.fence = core.check("vkCreateFence", doing, answer)?;
            if core.push.is_none() {
                let sizes = [vk::DescriptorPoolSize {
                    ty: vk::DescriptorType::STORAGE_BUFFER,
                    descriptor_count: MOST_LAUNCHES * MAX_BUFFERS,
                }];
                let info = vk::DescriptorPoolCreateInfo::default().max_sets(MOST_LAUNCHES).pool_sizes(&sizes);
                // SAFETY: as above.
                let answer = unsafe { core.device.create_descriptor_pool(&info, None) };
                frame.descriptors = core.check("vkCreateDescriptorPool", doing, answer)?;
            }
        }
        use vk::MemoryPropertyFlags as Has;
        let seen = Has::HOST_VISIBLE | Has::HOST_COHERENT;
        let all = STAGING_BYTES * FRAMES as u64;
        let wishes = [(seen, Has::DEVICE_LOCAL), (seen, Has::empty())];
        map(
            core,
            &mut self.staging,
            all,
            vk::BufferUsageFlags::TRANSFER_SRC,
            &wishes,
            "data on its way to the device",
        )?;
        let wishes = [(seen | Has::HOST_CACHED, Has::empty()), (seen, Has::empty())];
        map(core, &mut self.back, STAGING_BYTES, vk::BufferUsageFlags::TRANSFER_DST, &wishes, "data on its way back")
    }

    /// Copies bytes to a part of the device's memory.
    pub fn write(&mut self, to: Part, offset: u64, bytes: &[u8]) -> Result<()> {
        assert!(self.recorded.is_none(), "nothing is copied while launches are recorded");
        let mut at = to.at + offset;
        let mut left = bytes;
        while !left.is_empty() {
            self.begin()?;
            let frame = &self.frames[self.at];
            let room = STAGING_BYTES - frame.staged;
            if room == 0 {
                self.submit()?;
                continue;
            }
            let count = room.min(left.len() as u64);
            let from = self.at as u64 * STAGING_BYTES + frame.staged;
            let (now, later) = left.split_at(count as usize);
            // SAFETY: `from + count` is within the frame's share of the mapped memory, which the device does not read
            // before the frame is submitted, and is done with: `begin` has waited.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), self.staging.host.add(from as usize), now.len()) };
            let touched = Touched { reads: Vec::new(), writes: vec![(to.buffer, at..at + count)] };
            self.before_copy(touched);
            let region = [vk::BufferCopy { src_offset: from, dst_offset: at, size: count }];
            let frame = &mut self.frames[self.at];
            // SAFETY: the frame is being recorded, and both ranges are within their buffers.
            unsafe {
                self.core.device.cmd_copy_buffer(frame.commands, self.staging.block.buffer, to.buffer, &region);
            }
            frame.staged += count.next_multiple_of(4);
            frame.copied += count;
            at += count;
            left = later;
        }
        self.core.validate(|| format!("copy {} bytes to the device", bytes.len()))
    }

    /// Copies bytes back, when everything before has been done.
    pub fn read(&mut self, from: Part, offset: u64, bytes: &mut [u8]) -> Result<()> {
        assert!(self.recorded.is_none(), "nothing is copied while launches are recorded");
        let mut at = from.at + offset;
        let count = bytes.len();
        for piece in bytes.chunks_mut(STAGING_BYTES as usize) {
            self.begin()?;
            let size = piece.len() as u64;
            let (read, back) = ((from.buffer, at..at + size), (self.back.block.buffer, 0..size));
            self.before_copy(Touched { reads: vec![read], writes: vec![back] });
            let region = [vk::BufferCopy { src_offset: at, dst_offset: 0, size }];
            let frame = &mut self.frames[self.at];
            frame.copied += size;
            // SAFETY: the frame is being recorded, and both ranges are within their buffers.
            unsafe {
                self.core.device.cmd_copy_buffer(frame.commands, from.buffer, self.back.block.buffer, &region);
            }
            self.core.barrier_before_host(self.frames[self.at].commands);
            self.frames[self.at].hazards.forget();
            self.wait()?;
            // SAFETY: the mapped memory has as many bytes, and the device is done with it.
            unsafe { std::ptr::copy_nonoverlapping(self.back.host, piece.as_mut_ptr(), piece.len()) };
            at += size;
        }
        self.core.validate(|| format!("copy {count} bytes back"))
    }

    /// Starts a kernel.
    pub fn launch(
        &mut self,
        kernel: Kernel,
        ready: Ready,
        groups: [u32; 3],
        buffers: &[&Arc<Held>],
        constants: &[u32],
    ) -> Result<()> {
        if let Some(recorded) = &mut self.recorded {
            return recorded.launch(self.launches, kernel, ready, groups, buffers, constants);
        }
        self.begin()?;
        let frame = &mut self.frames[self.at];
        let Frame { commands, descriptors, ref mut hazards, .. } = *frame;
        let into = Into { commands, descriptors, hazards };
        let parts: Vec<Part> = buffers.iter().map(|held| held.part).collect();
        self.core.dispatch(into, kernel, ready, groups, &parts, constants)?;
        self.was_launched(kernel, kernel, 1)?;
        self.core.validate(|| format!("run {}", kernel.function()))
    }

    /// Notes kernels of the frame, and hands it over when it has enough.
    fn was_launched(&mut self, first: Kernel, last: Kernel, launches: u32) -> Result<()> {
        let frame = &mut self.frames[self.at];
        frame.first = frame.first.or(Some(first));
        frame.last = Some(last);
        frame.launches += launches;
        if frame.launches >= self.launches { self.submit() } else { Ok(()) }
    }

    /// Records launches from here on, instead of doing them.
    pub fn start_recording(&mut self) -> Result<()> {
        self.refuse_broken()?;
        assert!(self.recorded.is_none(), "launches are recorded already");
        self.recorded = Some(Recorded::new(Arc::clone(&self.core))?);
        Ok(())
    }

    /// What was recorded since then.
    pub fn end_recording(&mut self) -> Result<Recorded> {
        let recorded = self.recorded.take().expect("launches are recorded");
        recorded.ended()
    }

    /// Does what was recorded.
    pub fn replay(&mut self, recorded: &Recorded) -> Result<()> {
        for portion in recorded.portions() {
            self.begin()?;
            let frame = &mut self.frames[self.at];
            frame.hazards.forget();
            // SAFETY: the frame is being recorded; the portion is whole, may be in several frames, and is there until the
            // device is done with it: `Recording` waits before it goes.
            unsafe { self.core.device.cmd_execute_commands(frame.commands, &[portion.commands]) };
            self.was_launched(portion.first, portion.last, portion.launches)?;
        }
        self.core.validate(|| "run recorded kernels".to_owned())
    }

    /// Does what was recorded so many times: how long the device took.
    pub fn timed(&mut self, recorded: &Recorded, times: u32) -> Result<Elapsed> {
        self.wait()?;
        let started = Instant::now();
        self.mark(0)?;
        (0..times).try_for_each(|_| self.replay(recorded))?;
        self.mark(1)?;
        self.wait()?;
        let Some(tick) = self.core.adapter.tick else {
            return Ok(Elapsed { seconds: started.elapsed().as_secs_f64(), clock: Clock::Host });
        };
        let mut times = [0u64; 2];
        // SAFETY: both were written by frames that are done.
        let answer = unsafe {
            let wait = vk::QueryResultFlags::TYPE_64;
            self.core.device.get_query_pool_results(self.queries, MARKS, &mut times, wait)
        };
        self.core.check("vkGetQueryPoolResults", || "measure time".to_owned(), answer)?;
        let seconds = times[1].saturating_sub(times[0]) as f64 * tick * 1e-9;
        Ok(Elapsed { seconds, clock: Clock::Device })
    }

    /// Lets the device note the time, first or last.
    fn mark(&mut self, number: u32) -> Result<()> {
        if self.queries == vk::QueryPool::null() {
            return Ok(());
        }
        self.begin()?;
        let frame = &mut self.frames[self.at];
        let stage = vk::PipelineStageFlags::BOTTOM_OF_PIPE;
        // SAFETY: the frame is being recorded, and no frame uses these two queries; each is reset before it is written.
        unsafe {
            self.core.device.cmd_reset_query_pool(frame.commands, self.queries, MARKS + number, 1);
            self.core.device.cmd_write_timestamp(frame.commands, stage, self.queries, MARKS + number);
        }
        Ok(())
    }

    /// Makes sure that a frame is being recorded.
    fn begin(&mut self) -> Result<()> {
        self.refuse_broken()?;
        if self.frames[self.at].state == State::Recording {
            return Ok(());
        }
        self.finish(self.at)?;
        let core = &self.core;
        let frame = &mut self.frames[self.at];
        if frame.descriptors != vk::DescriptorPool::null() {
            // SAFETY: the device is done with the frame, so with its descriptors.
            let answer =
                unsafe { core.device.reset_descriptor_pool(frame.descriptors, vk::DescriptorPoolResetFlags::empty()) };
            core.check("vkResetDescriptorPool", || "record kernels".to_owned(), answer)?;
        }
        let info = vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        // SAFETY: as above; beginning resets what was recorded.
        let answer = unsafe { core.device.begin_command_buffer(frame.commands, &info) };
        core.check("vkBeginCommandBuffer", || "record kernels".to_owned(), answer)?;
        if self.queries != vk::QueryPool::null() {
            let first = 2 * self.at as u32;
            // SAFETY: the frame is being recorded, and no other uses its two queries.
            unsafe { core.device.cmd_reset_query_pool(frame.commands, self.queries, first, 2) };
            let stage = vk::PipelineStageFlags::TOP_OF_PIPE;
            // SAFETY: as above.
            unsafe { core.device.cmd_write_timestamp(frame.commands, stage, self.queries, first) };
        }
        frame.state = State::Recording;
        frame.hazards.forget();
        (frame.staged, frame.launches, frame.copied) = (0, 0, 0);
        (frame.first, frame.last) = (None, None);
        Ok(())
    }

    /// A barrier before a copy, if it needs one.
    fn before_copy(&mut self, touched: Touched) {
        let frame = &mut self.frames[self.at];
        if frame.hazards.touch(touched) {
            self.core.barrier(frame.commands);
        }
    }

    /// Hands what was recorded to the device.
    pub fn submit(&mut self) -> Result<()> {
        self.refuse_broken()?;
        if self.frames[self.at].state != State::Recording {
            return Ok(());
        }
        let answer = self.hand_over();
        if let Err(fault) = answer {
            return Err(self.break_with(fault));
        }
        let frame = &mut self.frames[self.at];
        frame.state = State::Submitted;
        frame.serial = self.core.recording.fetch_add(1, Ordering::AcqRel);
        self.at = (self.at + 1) % FRAMES;
        Ok(())
    }

    fn hand_over(&mut self) -> Result<()> {
        let core = &self.core;
        let frame = &self.frames[self.at];
        if self.queries != vk::QueryPool::null() {
            let stage = vk::PipelineStageFlags::BOTTOM_OF_PIPE;
            // SAFETY: the frame is being recorded, and no other uses its two queries.
            unsafe { core.device.cmd_write_timestamp(frame.commands, stage, self.queries, 2 * self.at as u32 + 1) };
        }
        let doing = || frame.told();
        // SAFETY: the frame is being recorded.
        let answer = unsafe { core.device.end_command_buffer(frame.commands) };
        core.check("vkEndCommandBuffer", doing, answer)?;
        // SAFETY: the fence is not in use.
        let answer = unsafe { core.device.reset_fences(&[frame.fence]) };
        core.check("vkResetFences", doing, answer)?;
        let commands = [frame.commands];
        let info = [vk::SubmitInfo::default().command_buffers(&commands)];
        // SAFETY: only this value submits to the queue, and it is not shared; what was recorded lives until the fence says
        // that it is done.
        let answer = unsafe { core.device.queue_submit(core.queue, &info, frame.fence) };
        core.check("vkQueueSubmit", doing, answer)
    }

    /// Waits until everything has been done.
    pub fn wait(&mut self) -> Result<()> {
        self.submit()?;
        for next in 0..FRAMES {
            self.finish((self.at + next) % FRAMES)?;
        }
        // What was retired until now waits for a submission that has nothing to do with it.
        let now = self.core.recording.fetch_add(1, Ordering::AcqRel);
        self.core.done.fetch_max(now, Ordering::AcqRel);
        Ok(())
    }

    /// Waits until a frame is done, if it was submitted.
    fn finish(&mut self, at: usize) -> Result<()> {
        let core = Arc::clone(&self.core);
        let frame = &self.frames[at];
        if frame.state != State::Submitted {
            return Ok(());
        }
        let patience = u64::try_from(self.patience.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: the fence was submitted.
        let answer = unsafe { core.device.wait_for_fences(&[frame.fence], true, patience) };
        let doing = || frame.told();
        if answer == Err(vk::Result::TIMEOUT) {
            let fault = core.late(doing(), self.patience);
            return Err(self.break_with(fault));
        }
        if let Err(fault) = core.check("vkWaitForFences", doing, answer) {
            return Err(self.break_with(fault));
        }
        core.done.fetch_max(frame.serial, Ordering::AcqRel);
        self.frames[at].state = State::Idle;
        self.adapt(at)
    }

    /// Makes submissions longer or shorter by what the last one took.
    fn adapt(&mut self, at: usize) -> Result<()> {
        let Some(tick) = self.core.adapter.tick.filter(|_| self.frames[at].launches > 0) else { return Ok(()) };
        let mut times = [0u64; 2];
        // SAFETY: the frame, which wrote both, is done.
        let answer = unsafe {
            let wait = vk::QueryResultFlags::TYPE_64;
            self.core.device.get_query_pool_results(self.queries, 2 * at as u32, &mut times, wait)
        };
        self.core.check("vkGetQueryPoolResults", || self.frames[at].told(), answer)?;
        let took = Duration::from_nanos((times[1].saturating_sub(times[0]) as f64 * tick) as u64);
        self.launches = next_launches(self.launches, self.frames[at].launches, took);
        Ok(())
    }

    /// What went wrong ends everything if the device cannot be relied on after it.
    fn break_with(&mut self, fault: Fault) -> Fault {
        let broken = match &*fault.kind {
            FaultKind::GpuCall { call, code, doing, .. } => {
                Broken::Lost { call, code: code.clone(), doing: doing.clone() }
            }
            FaultKind::GpuTimeout { doing, .. } => Broken::Late { doing: doing.clone() },
            _ => return fault,
        };
        self.broken.get_or_insert(broken);
        fault
    }

    fn refuse_broken(&self) -> Result<()> {
        let device = self.core.adapter.name.clone();
        let kind = match self.broken.clone() {
            None => return Ok(()),
            Some(Broken::Lost { call, code, doing }) => {
                FaultKind::GpuCall { device, call, doing, code, launched: None }
            }
            Some(Broken::Late { doing }) => return Err(self.core.late(doing, self.patience)),
        };
        Err(Fault::new(Place::default(), kind))
    }
}

/// How many launches the next submission may have, after one with `had` of `most` that took some time.
fn next_launches(most: u32, had: u32, took: Duration) -> u32 {
    if took > LONG {
        (most.min(had) / 2).max(1)
    } else if had >= most && took < LONG / 4 {
        (most * 2).min(MOST_LAUNCHES)
    } else {
        most
    }
}

impl Core {
    fn late(&self, doing: String, patience: Duration) -> Fault {
        let device = self.adapter.name.clone();
        Fault::new(Place::default(), FaultKind::GpuTimeout { device, doing, seconds: patience.as_secs() })
    }
}

/// Makes memory that both sides see, mapped as long as it is there.
fn map(
    core: &Core,
    staging: &mut Staging,
    bytes: u64,
    usage: vk::BufferUsageFlags,
    wishes: &[(vk::MemoryPropertyFlags, vk::MemoryPropertyFlags)],
    purpose: &str,
) -> Result<()> {
    staging.block = core.make_block(bytes, usage, wishes, purpose)?;
    // SAFETY: the memory is visible to the host and not mapped yet; freeing it ends the mapping.
    let answer =
        unsafe { core.device.map_memory(staging.block.memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty()) };
    staging.host = core.check("vkMapMemory", || format!("map memory for {purpose}"), answer)?.cast();
    Ok(())
}

impl Drop for Stream {
    fn drop(&mut self) {
        if matches!(self.broken, Some(Broken::Late { .. })) {
            self.core.abandoned.store(true, Ordering::Release);
            std::mem::forget(Arc::clone(&self.core));
            return;
        }
        let device = &self.core.device;
        // SAFETY: the device is alive; of one that is lost nothing is in use.
        let _ = unsafe { device.device_wait_idle() };
        self.core.done.store(u64::MAX, Ordering::Release);
        for frame in &self.frames {
            // SAFETY: nothing is in use any more, here and below; null handles are allowed.
            unsafe { device.destroy_fence(frame.fence, None) };
            // SAFETY: as above.
            unsafe { device.destroy_descriptor_pool(frame.descriptors, None) };
        }
        // SAFETY: as above; the command buffers go with their pool.
        unsafe { device.destroy_command_pool(self.pool, None) };
        // SAFETY: as above.
        unsafe { device.destroy_query_pool(self.queries, None) };
        for staging in [&self.staging, &self.back] {
            // SAFETY: as above.
            unsafe { self.core.destroy_block(&staging.block) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn submissions_grow_while_they_are_short() {
        let took = |ms| Duration::from_millis(ms);
        assert_eq!(next_launches(1, 1, took(1)), 2);
        assert_eq!(next_launches(16, 16, took(24)), 32);
        assert_eq!(next_launches(16, 3, took(1)), 16, "it was not full");
        assert_eq!(next_launches(64, 64, took(1)), 64);
        assert_eq!(next_launches(16, 16, took(50)), 16);
        assert_eq!(next_launches(64, 10, took(400)), 5, "half of what took too long");
        assert_eq!(next_launches(1, 1, took(4000)), 1);
    }
}
