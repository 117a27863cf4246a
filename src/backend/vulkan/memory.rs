//! Memory of the device: large blocks, of which buffers are parts.
//!
//! Everything on the device happens in the order of the calls, so what is given back can be used again at once: whoever
//! uses it next comes after whoever used it last. Only a whole block has to wait for the device before it is given back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ash::vk;

use super::core::{Block, Core};
use super::space::{ALIGNMENT, Space};
use crate::backend::gpu::driver::DeviceMemory;
use crate::error::{Fault, FaultKind, Place, Result};

/// Bytes of a block; of a smaller heap a sixteenth, for larger buffers their own size.
const BLOCK_BYTES: u64 = 128 << 20;
/// Bytes of blocks that are kept while nothing is in them.
const KEPT_BYTES: u64 = 256 << 20;

const USAGE: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
    vk::BufferUsageFlags::STORAGE_BUFFER.as_raw()
        | vk::BufferUsageFlags::TRANSFER_SRC.as_raw()
        | vk::BufferUsageFlags::TRANSFER_DST.as_raw(),
);
/// The device's own memory, and not the small window of it that the host sees, if there is other.
const WISHES: [(vk::MemoryPropertyFlags, vk::MemoryPropertyFlags); 3] = [
    (vk::MemoryPropertyFlags::DEVICE_LOCAL, vk::MemoryPropertyFlags::HOST_VISIBLE),
    (vk::MemoryPropertyFlags::DEVICE_LOCAL, vk::MemoryPropertyFlags::empty()),
    (vk::MemoryPropertyFlags::empty(), vk::MemoryPropertyFlags::empty()),
];

/// Part of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub buffer: vk::Buffer,
    pub at: u64,
    pub bytes: u64,
    block: u64,
}

/// All memory that buffers are parts of.
pub(super) struct Memory {
    core: Arc<Core>,
    blocks: BTreeMap<u64, (Block, Space)>,
    next: u64,
    /// Blocks that are given back when a submission is done.
    retired: Vec<(u64, Block)>,
    heap: u32,
    /// Bytes that may be held at most.
    most: u64,
}

impl Memory {
    /// None yet; at most `most` bytes.
    pub fn new(core: Arc<Core>, most: u64) -> Memory {
        let kind = core.memory_type(u32::MAX, &WISHES).unwrap_or(0);
        let heap = core.adapter.memory.memory_types[kind].heap_index;
        Memory { core, blocks: BTreeMap::new(), next: 0, retired: Vec::new(), heap, most }
    }

    fn held(&self) -> u64 {
        self.blocks
            .values()
            .map(|(block, _)| block)
            .chain(self.retired.iter().map(|(_, block)| block))
            .map(|b| b.bytes)
            .sum()
    }

    /// What is free on the device.
    pub fn state(&self) -> DeviceMemory {
        let held = self.held();
        let heap = self.core.heap(self.heap, held);
        let total = heap.total.min(self.most);
        DeviceMemory { free: heap.free.min(total.saturating_sub(held)), total }
    }

    /// A part of a block; `None` if there is no memory for it now.
    pub fn take(&mut self, bytes: u64, purpose: &str) -> Result<Option<Part>> {
        self.collect();
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        for (&number, (block, space)) in &mut self.blocks {
            if let Some(at) = space.take(bytes) {
                return Ok(Some(Part { buffer: block.buffer, at, bytes, block: number }));
            }
        }
        let DeviceMemory { free, total } = self.state();
        let usual = BLOCK_BYTES.min((total / 16).next_multiple_of(ALIGNMENT)).min(self.core.buffer_bytes);
        for block_bytes in [bytes.max(usual), bytes] {
            if block_bytes > free {
                continue;
            }
            match self.core.make_block(block_bytes, USAGE, &WISHES, purpose) {
                Ok(block) => return Ok(Some(self.add(block, bytes))),
                Err(fault) if !is_out_of_memory(&fault) => return Err(fault),
                Err(_) => {}
            }
        }
        Ok(None)
    }

    fn add(&mut self, block: Block, bytes: u64) -> Part {
        let mut space = Space::new(block.bytes);
        let at = space.take(bytes).expect("a block is as large as what it was made for");
        let part = Part { buffer: block.buffer, at, bytes, block: self.next };
        self.blocks.insert(self.next, (block, space));
        self.next += 1;
        part
    }

    /// Gives a part back.
    pub fn give(&mut self, part: Part) {
        let (_, space) = self.blocks.get_mut(&part.block).expect("a part holds its block");
        space.give(part.at, part.bytes);
        if space.is_empty() {
            self.retire(KEPT_BYTES);
        }
    }

    /// Retires blocks in which nothing is, but for `keep` bytes of them.
    pub fn retire(&mut self, keep: u64) {
        let empty: Vec<(u64, u64)> =
            self.blocks.iter().filter(|(_, (_, space))| space.is_empty()).map(|(&n, (b, _))| (n, b.bytes)).collect();
        let mut kept = 0;
        for (number, bytes) in empty {
            if kept + bytes <= keep {
                kept += bytes;
            } else if let Some((block, _)) = self.blocks.remove(&number) {
                self.retired.push((self.core.now(), block));
            }
        }
    }

    /// Gives retired blocks back to the device that it is done with.
    pub fn collect(&mut self) {
        let done = self.core.done.load(Ordering::Acquire);
        self.retired.retain(|(until, block)| {
            if *until <= done {
                // SAFETY: no part of it is in use by the program, and what the device was to do with it is done.
                unsafe { self.core.destroy_block(block) };
            }
            *until > done
        });
    }

    /// The fault that names what was wanted and what there is.
    pub fn exhausted(&self, wanted: u64, purpose: &str) -> Fault {
        let (device, purpose) = (self.core.adapter.name.clone(), purpose.to_owned());
        let DeviceMemory { free, total } = self.state();
        Fault::new(Place::default(), FaultKind::GpuMemory { device, purpose, wanted, free, total })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.core.abandoned.load(Ordering::Acquire) {
            return;
        }
        let blocks = self.blocks.values().map(|(block, _)| block).chain(self.retired.iter().map(|(_, block)| block));
        for block in blocks {
            // SAFETY: buffers hold what this value is part of, so there are none; the stream, dropped before, has waited.
            unsafe { self.core.destroy_block(block) };
        }
    }
}

fn is_out_of_memory(fault: &Fault) -> bool {
    matches!(&*fault.kind, FaultKind::GpuCall { code, .. }
        if code == "VK_ERROR_OUT_OF_DEVICE_MEMORY" || code == "VK_ERROR_OUT_OF_HOST_MEMORY" || code == "VK_ERROR_TOO_MANY_OBJECTS")
}
