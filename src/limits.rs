//! Every limit of the program, in one place and with its reason.
//!
//! A limit is checked before anything is allocated for the value it bounds.

/// Largest safetensors header read or written, in bytes. The colibri engine refuses larger ones.
pub const MAX_HEADER_BYTES: u64 = 512 << 20;
/// Smallest possible header: `{}`.
pub const MIN_HEADER_BYTES: u64 = 2;
/// Deepest nesting of JSON in a header; a tensor entry needs three levels.
pub const MAX_HEADER_DEPTH: usize = 8;
/// Most tensors in one file: GLM-5.2 has about 120,000 in all its files together.
pub const MAX_TENSORS_PER_FILE: usize = 1 << 20;
/// Longest tensor name, in bytes.
pub const MAX_NAME_BYTES: usize = 512;
/// Most dimensions of a tensor; the colibri engine refuses more.
pub const MAX_RANK: usize = 8;
/// Most weight files in one container; the colibri engine refuses more.
pub const MAX_FILES: usize = 512;
/// Most entries in all stamps of a container together; the colibri engine refuses more.
pub const MAX_STAMPS: usize = 4096;
/// Largest `config.json`, `generation_config.json` or recipe, in bytes.
pub const MAX_CONFIG_BYTES: u64 = 4 << 20;
/// Largest `model.safetensors.index.json`, in bytes.
pub const MAX_INDEX_BYTES: u64 = 256 << 20;
/// Largest manifest or progress file, in bytes.
pub const MAX_MANIFEST_BYTES: u64 = 512 << 20;
/// Largest file that is carried along as a small file, in bytes.
pub const MAX_SMALL_FILE_BYTES: u64 = 128 << 20;
/// Most hidden layers; the colibri engine refuses more.
pub const MAX_LAYERS: u64 = 128;
/// Most routed experts of a layer; the colibri engine refuses more.
pub const MAX_EXPERTS: u64 = 4096;
/// Most experts chosen for a token; the colibri engine refuses more.
pub const MAX_EXPERTS_PER_TOKEN: u64 = 64;
/// Largest vocabulary; the colibri engine refuses more.
pub const MAX_VOCABULARY: u64 = 1 << 24;
/// Largest width of any matrix that a config may imply.
pub const MAX_WIDTH: u64 = 1 << 24;
/// Most attention or indexer heads.
pub const MAX_HEADS: u64 = 4096;
/// Most stop ids, of `config.json` and `generation_config.json` together; the colibri engine refuses more.
pub const MAX_STOP_IDS: usize = 8;
/// Findings that a text report prints before it only counts the rest.
pub const MAX_PRINTED_FINDINGS: usize = 20;
/// Most threads: more than any machine has cores, and few enough to be started.
pub const MAX_THREADS: usize = 1024;
/// Tensors that a text report lists one by one before it joins alike ones.
pub const MAX_LISTED_TENSORS: usize = 1000;
/// Source bytes that one task of a conversion works on; at least one row.
pub const BLOCK_SOURCE_BYTES: u64 = 2 << 20;
/// Bytes of zeros that no trained weights have in a row.
pub const ZEROS_BYTES: usize = 1 << 20;
/// Bytes of one write of a weight file: whole pages.
pub const WRITE_CHUNK_BYTES: usize = 4 << 20;
/// Writes that may wait for the disk.
pub const WRITE_CHUNKS: usize = 3;
/// Blocks that may be finished before the one whose turn it is, for each thread.
pub const BLOCKS_AHEAD: usize = 2;
/// Bytes that the system is asked for at once before they are needed: it takes no more from one request.
pub const READ_AHEAD_BYTES: u64 = 128 << 10;
/// Bytes of a sequential read while hashing a file.
pub const HASH_READ_BYTES: usize = 4 << 20;
/// Longest line that is written to a terminal for one name before it is cut.
pub const MAX_PRINTED_NAME: usize = 160;
/// Longest message of another crate that is written to a terminal before it is cut.
pub const MAX_PRINTED_MESSAGE: usize = 4096;
/// Elements that one task of a comparison works on; at least one row. Results depend on it in their last digits.
pub const DIFF_BLOCK_ELEMENTS: u64 = 1 << 19;
/// Bytes of each side that one task compares.
pub const DIFF_READ_BYTES: usize = 1 << 20;
/// Bytes of one step of verifying a file: small enough to stay in a core's own cache between reading and hashing.
pub const VERIFY_READ_BYTES: usize = 256 << 10;
/// Experts that are read at the same time: with one the next is there soonest, and less is read ahead in vain.
pub const EXPERT_READERS: usize = 1;
/// Pieces of an expert that are read at the same time: more make the disk no faster.
pub const EXPERT_READ_THREADS: usize = 4;
/// Bytes of such a piece, whole pages: many to an expert, so that all threads end together.
pub const EXPERT_READ_BYTES: usize = 1 << 20;
/// Workers that hash files, for each thread: while some wait for the disk, others hash.
pub const HASH_WORKERS: usize = 4;
/// Tensors that `diff` prints before it only counts the rest.
pub const MAX_PRINTED_TENSORS: usize = 20;
/// Longest row of a task, text or request file, in bytes.
pub const MAX_ROW_BYTES: u64 = 16 << 20;
/// Most choices of one question.
pub const MAX_CHOICES: usize = 256;
/// Rows whose logits are looked at together: [64, vocab_size] f32 values, 40 MB for GLM-5.2.
pub const LOGIT_ROWS: usize = 64;
/// Tokens that go through the layers together when rows are scored.
pub const BATCH_ROWS: usize = 512;
/// The same at most, where routed experts are read from the disk for every batch.
pub const MAX_BATCH_ROWS: usize = 8192;
/// Batches of tokens of rows that wait until they are scored together; texts of one row have much in common, and that goes
/// through the layers once.
pub const WAITING_BATCHES: usize = 4;
/// Rows that wait until they are scored together, at most.
pub const WAITING_ROWS: usize = 2048;
/// Largest prompt, in bytes.
pub const MAX_PROMPT_BYTES: u64 = 16 << 20;
/// Largest chat template, or tokenizer_config.json that holds one, in bytes; GLM-5.2's has about 5 KB.
pub const MAX_TEMPLATE_BYTES: u64 = 16 << 20;
/// Most steps of rendering a chat template; that of GLM-5.2 takes a few hundred for one message.
pub const MAX_TEMPLATE_STEPS: u64 = 1 << 18;
/// Most bytes that a chat template makes on the way, all texts and lists together; each is counted as it would be written out.
pub const MAX_TEMPLATE_MADE_BYTES: u64 = 256 << 20;
/// Largest chat template that is rendered, in bytes.
pub const MAX_TEMPLATE_SOURCE_BYTES: u64 = 64 << 10;
/// Most lists within lists of a value in a chat template.
pub const MAX_TEMPLATE_DEPTH: usize = 64;
/// Most tokens that are drafted before each verification.
pub const MAX_DRAFTS: usize = 16;
/// Most GPUs that compute one model.
pub const MAX_GPUS: usize = 16;
/// Most parts of a run.
pub const MAX_PARTS: usize = 1 << 16;
/// Largest file that the Hub keeps in git itself, in bytes; larger ones go to LFS or Xet.
pub const MAX_GIT_BYTES: u64 = 10 << 20;
/// Largest file that the Hub takes, in bytes.
pub const MAX_HUB_FILE_BYTES: u64 = 50_000_000_000;
/// Largest listing of a repository that is read, in bytes.
pub const MAX_LISTING_BYTES: u64 = 256 << 20;
/// Largest report that is read, in bytes.
pub const MAX_REPORT_BYTES: u64 = 1 << 30;

/// Bytes at both ends of a weight file that parts of a verification are bound to.
pub const BOUND_END_BYTES: u64 = 64 << 10;
