//! Every kind of fault, with its message and its hint.
//!
//! The name of a variant in kebab-case is its `kind` in JSON reports.

use std::io;
use std::path::PathBuf;

use super::{escaped, escaped_message, escaped_whole, listed};
use crate::format::{ByteCounts, Format};
use crate::tensor::{Dtype, Shape, TensorName};

/// A number with what it counts: `3 layers`.
pub type Count = (u64, &'static str);

/// What is wrong.
#[derive(Debug, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
#[allow(missing_docs)] // the messages say it
pub enum FaultKind {
    // ---- files -------------------------------------------------------------------------------------------------
    #[error("cannot {action}: {source}")]
    Io { action: &'static str, source: io::Error },
    #[error("the file has {found} bytes, at most {limit} are read")]
    FileTooLarge { limit: u64, found: u64 },
    #[error("the file ended while it was read: expected {expected} bytes, found {found}")]
    FileShrank { expected: u64, found: u64 },
    #[error("no such checkpoint, container or .safetensors file")]
    NotFound,
    #[error("not a directory")]
    NotADirectory,
    #[error("not a regular file")]
    NotAFile,
    #[error("the link leads to a file that does not exist")]
    DanglingLink,
    #[error("cannot start threads: {}", escaped_message(message))]
    Threads { message: String },

    // ---- safetensors header ------------------------------------------------------------------------------------
    #[error("the file has {file_bytes} bytes, too few for a safetensors header")]
    HeaderTruncated { file_bytes: u64 },
    #[error("a Git LFS pointer stands in the place of the file")]
    GitLfsPointer,
    #[error("the header's length is {found} bytes, but only {available} follow in the file")]
    HeaderLength { found: u64, available: u64 },
    #[error("the header's length is {found} bytes, at most {limit} are read")]
    HeaderTooLarge { found: u64, limit: u64 },
    #[error("the header is not valid UTF-8")]
    HeaderNotUtf8,
    #[error("the header {}, expected a JSON object", found.map_or("is empty".to_owned(), |c| format!("begins with `{}`", c.escape_default())))]
    HeaderNotObject { found: Option<char> },
    #[error("the header does not parse: {}", escaped_message(message))]
    HeaderSyntax { message: String },
    #[error("the header is padded with byte {found:#04x}, expected spaces")]
    HeaderPadding { found: u8 },
    #[error("the header names the tensor twice")]
    DuplicateInHeader,
    #[error("the header has {found} tensors, at most {limit} are read")]
    TooManyTensors { found: usize, limit: usize },
    #[error("the tensor's name has {found} bytes, expected 1 to {limit}")]
    NameLength { found: usize, limit: usize },
    #[error("`__metadata__`{} is {}, expected {}", key.as_ref().map(|key| format!(" has `{}`, which", escaped(key))).unwrap_or_default(), escaped(found), if key.is_some() { "a string" } else { "an object of strings" })]
    MetadataNotStrings { key: Option<String>, found: String },
    #[error("the header has `__metadata__` twice")]
    MetadataTwice,
    #[error("`__metadata__` has `{}` twice", escaped(key))]
    MetadataKeyTwice { key: String },
    #[error("the name holds control characters or marks that hide or reorder text")]
    NameUnprintable,
    #[error("the entry lacks `{key}`")]
    EntryKeyMissing { key: &'static str },
    #[error("the entry has `{}` twice", escaped(key))]
    EntryKeyTwice { key: String },
    #[error("the entry has `{}`, expected only `dtype`, `shape` and `data_offsets`", escaped(key))]
    EntryKeyUnknown { key: String },
    #[error("the entry does not parse: {}", escaped_message(message))]
    EntrySyntax { message: String },
    #[error("unknown dtype `{}`, expected one of safetensors: F32, BF16, U8 and so on", escaped(found))]
    UnknownDtype { found: String },
    #[error("the shape has {found} dimensions, at most {limit} are read")]
    RankTooLarge { found: usize, limit: usize },
    #[error("{dtype} {shape} does not fit in 64 bits or whole bytes")]
    SizeOverflow { dtype: Dtype, shape: Shape },
    #[error("`data_offsets` are {begin}..{end}: they run backwards")]
    OffsetsBackwards { begin: u64, end: u64 },
    #[error("`data_offsets` are {begin}..{end}: they do not fit in 64 bits")]
    OffsetsOverflow { begin: u64, end: u64 },
    #[error("`data_offsets` are {begin}..{end}: the data have {data_bytes} bytes")]
    OffsetsOutside { begin: u64, end: u64, data_bytes: u64 },
    #[error(
        "the file is cut off: its header describes {expected} bytes, it has {found}; {} incomplete, this one first", are(*tensors as u64, "tensor")
    )]
    DataTruncated { expected: u64, found: u64, tensors: usize },
    #[error("{dtype} {shape} takes {expected} bytes, `data_offsets` span {found}")]
    SpanMismatch { dtype: Dtype, shape: Shape, expected: u64, found: u64 },
    #[error("bytes {begin}..{end} of the data overlap tensor {other}")]
    Overlap { begin: u64, end: u64, other: TensorName },
    #[error("bytes {begin}..{end} of the data belong to no tensor")]
    Gap { begin: u64, end: u64 },
    #[error("{} bytes follow the last tensor, which ends at byte {data_end} of {file_bytes}", file_bytes - data_end)]
    TrailingBytes { data_end: u64, file_bytes: u64 },
    #[error("the data starts at an odd place for {dtype}: byte {offset} is not a multiple of {alignment}")]
    Misaligned { dtype: Dtype, offset: u64, alignment: u64 },

    // ---- index and set of files --------------------------------------------------------------------------------
    #[error("the index does not parse: {}", escaped_message(message))]
    IndexSyntax { message: String },
    #[error("the index names the tensor twice")]
    DuplicateInIndex,
    #[error("the index names the file `{}`, which is not a plain name that ends in .safetensors", escaped(found))]
    IndexPath { found: String },
    #[error("the index names this file, which is missing; it should hold {}", counted(*tensors as u64, "tensor"))]
    ShardMissing { tensors: usize },
    #[error("the index says this file holds the tensor, but it does not")]
    TensorNotInShard,
    #[error("the index says that {} holds the tensor, but this file does", escaped(other))]
    IndexWrongFile { other: String },
    #[error("the name of this weight file is not UTF-8")]
    WeightFileName,
    #[error("the file holds the tensor, but the index does not name it")]
    TensorNotInIndex,
    #[error("the index does not name this file; {} read all the same", are(*tensors as u64, "tensor"))]
    FileNotInIndex { tensors: usize },
    #[error("the index says that file {} holds the tensor, but it is in this one", escaped(other))]
    TensorElsewhere { other: String },
    #[error("the tensor is also in {}", escaped(other))]
    DuplicateInFiles { other: String },
    #[error("`total_size` is {found}, the tensors take {expected} bytes")]
    TotalSize { expected: u64, found: u64 },
    #[error("`total_size` is missing or not a number")]
    TotalSizeMissing,
    #[error("there are {found} weight files and no model.safetensors.index.json")]
    IndexMissing { found: usize },
    #[error("the directory holds no .safetensors file")]
    NoWeights,
    #[error("the directory holds a file that is still being downloaded")]
    Unfinished,
    #[error("{found} weight files, at most {limit} are read")]
    TooManyFiles { found: usize, limit: usize },

    // ---- config ------------------------------------------------------------------------------------------------
    #[error("the file does not parse: {}", escaped_message(message))]
    JsonSyntax { message: String },
    #[error("the file is missing: nothing else says what the tensors should be")]
    ConfigAbsent,
    #[error("`{key}` is missing")]
    ConfigMissing { key: &'static str },
    #[error("`{key}` is {}, expected {expected}", escaped(found))]
    ConfigValue { key: &'static str, expected: String, found: String },
    #[error("the model is of type {}, expected glm_moe_dsa", escaped(found))]
    ModelType { found: String },
    #[error("`{key}` is missing: {consequence}")]
    ConfigSilent { key: &'static str, consequence: &'static str },
    #[error("{found} stop ids in config.json and generation_config.json together, at most {limit} are used")]
    TooManyStopIds { found: usize, limit: usize },
    #[error("neither config.json nor generation_config.json has an `eos_token_id`: generation would never stop")]
    NoStopIds,
    #[error("the file is missing: {consequence}")]
    SmallFileMissing { consequence: &'static str },

    // ---- census ------------------------------------------------------------------------------------------------
    #[error("the tensor is missing; config.json asks for {shape}")]
    TensorMissing { shape: Shape },
    #[error("the shape is {found}, config.json asks for {expected}")]
    ShapeMismatch { expected: Shape, found: Shape },
    #[error("the model has no such tensor")]
    UnknownTensor,
    #[error("the model has no such tensor, only {within}")]
    NestedTensor { within: TensorName },
    #[error("layer {layer} is missing altogether: {}", counted(*tensors as u64, "tensor"))]
    LayerMissing { layer: u64, tensors: usize },
    #[error("the indexer of layer {layer} is missing altogether: {}", counted(*tensors as u64, "tensor"))]
    IndexerMissing { layer: u64, tensors: usize },
    #[error("expert {expert} of layer {layer} is missing: {}", counted(*tensors as u64, "tensor"))]
    ExpertMissing { layer: u64, expert: u64, tensors: usize },
    #[error("the model has no tensors {what}")]
    PassAbsent { what: &'static str },
    #[error("lm_head.weight is missing and `tie_word_embeddings` is not true")]
    HeadMissing,
    #[error("`tie_word_embeddings` is true, but lm_head.weight is there and differs from the embedding")]
    HeadTied,

    // ---- source values -----------------------------------------------------------------------------------------
    #[error("{dtype} is not a source element type; F8_E4M3 with scales, BF16, F16 and F32 are")]
    SourceDtype { dtype: Dtype },
    #[error("{what} is not read yet")]
    SourceFormat { what: &'static str },
    #[error("F8_E4M3 without its scales: {scale} is nowhere")]
    ScaleMissing { scale: TensorName },
    #[error("the scales' dtype is {found}, expected F32, BF16 or F8_E8M0")]
    ScaleDtype { found: Dtype },
    #[error("the scale grid is {found} ({kind}), expected {expected}, one per 128 × 128 block of {weight}")]
    ScaleGrid { weight: Shape, expected: Shape, found: Shape, kind: &'static str },
    #[error("{dtype} {shape} is not a matrix, and only matrices have scales")]
    SourceNotMatrix { dtype: Dtype, shape: Shape },
    #[error("scales without a weight: {weight} is nowhere or is not F8_E4M3")]
    ScaleOrphan { weight: TensorName },
    #[error("row {row}, column {column} is {value}")]
    NonFinite { row: u64, column: u64, value: f32 },
    #[error("a code is not a number, which experts on a GPU cannot have")]
    GpuNanCode,
    #[error("{count} elements are not finite and count as 0; the first is row {row}, column {column}: {value}")]
    NonFiniteZeroed { count: u64, row: u64, column: u64, value: f32 },
    #[error("a colibri container is not a source (found {})", escaped(sign))]
    SourceIsContainer { sign: String },
    #[error("the model is quantized by {}, which is not read yet", escaped(method))]
    SourceQuantization { method: String },

    // ---- recipe and flags --------------------------------------------------------------------------------------
    #[error("{flag} {value}: {reason}")]
    Bits { flag: &'static str, value: u32, reason: &'static str },
    #[error("{class}: 2 bits in groups of {group_size} would keep three levels in four-bit storage")]
    TwoBitsGrouped { class: &'static str, group_size: u64 },
    #[error("group size {found} is not one of row, 16, 32, 48, 64, 96, 128, 192, 256")]
    GroupSize { found: u64 },
    #[error("the recipe does not parse: {}", escaped_message(message))]
    RecipeSyntax { message: String },
    #[error("the glob `{}` is malformed: {}", escaped(glob), escaped_message(message))]
    Glob { glob: String, message: String },
    #[error("the rule `{}` matches no matrix of this conversion", escaped(glob))]
    RuleUnused { glob: String },
    #[error("rule `{}`: {}{} is not a format that is written", escaped(glob), escaped(format), group_size.map(|g| format!(" with group size {g}")).unwrap_or_default())]
    RuleFormat { glob: String, format: String, group_size: Option<u64> },
    #[error("{flag} on the command line contradicts the recipe: {flag_value} against {recipe_value}")]
    RecipeConflict { flag: &'static str, flag_value: String, recipe_value: String },
    #[error(
        "{format} for a matrix of the MTP head: below 8 bits a scale per row loses the small half of `eh_proj`, and no draft is accepted"
    )]
    HeadFormat { format: Format },
    #[error("{format} for {shape} would be misread by the colibri engine as {taken}")]
    Misread { format: Format, shape: Shape, taken: String, safe: Vec<u64> },
    #[error("{format} cannot hold {shape}")]
    EmptyMatrix { format: Format, shape: Shape },
    #[error("the {pass} pass would emit nothing: {reason}")]
    EmptyPass { pass: &'static str, reason: String },
    #[error("{flag} is {}, expected {expected}", escaped(found))]
    FlagValue { flag: &'static str, expected: &'static str, found: String },
    #[error("{name} is not available in this version")]
    NotAvailable { name: &'static str },
    #[error("the container would break a limit of the colibri engine: {found} {}, at most {limit}", what)]
    EngineLimit { what: &'static str, found: u64, limit: u64 },

    #[error("the file's name is not valid UTF-8, so the file is not carried along")]
    NameNotUtf8,
    #[error("the file has {found} bytes and is not carried along; small files have at most {limit}")]
    NotCarried { limit: u64, found: u64 },

    // ---- queries ------------------------------------------------------------------------------------------------
    #[error("no tensor matches `{}`", escaped(glob))]
    NothingMatches { glob: String },
    #[error("{} is no class; classes are io, x, sh, o, kvb, attn, dmlp, f32, mtp, indexer", escaped(found))]
    UnknownClass { found: String },
    #[error("there is no row {row}: the tensor has {rows}")]
    NoSuchRow { row: u64, rows: u64 },

    // ---- destination -------------------------------------------------------------------------------------------
    #[error("source and destination are the same directory")]
    SameDirectory,
    #[error("the destination is the same file as {} of the source", escaped_whole(&other.to_string_lossy()))]
    SameFile { other: PathBuf },
    #[error("the destination is a file")]
    DestinationIsFile,
    #[error("the directory exists and holds {}, which this conversion did not write", listed(found))]
    DestinationUsed { found: Vec<String> },
    #[error(
        "the {pass} pass of this container was made with other parameters: {} was {}, now {}",
        escaped(parameter),
        escaped_whole(found),
        escaped_whole(wanted)
    )]
    OtherParameters { pass: &'static str, parameter: String, found: String, wanted: String },
    #[error("the {pass} pass of this container was begun and is not finished")]
    PassUnfinished { pass: &'static str },
    #[error("this container was made from another source: {}", escaped_whole(what))]
    OtherSource { what: String },
    #[error(
        "the file was finished by an earlier run, but its bytes have changed since: expected {expected}, found {found}"
    )]
    OutputChanged { expected: String, found: String },
    #[error("the file exists and holds other bytes than this conversion would write")]
    OutputExists,
    #[error("the small file is not the one that the source has now")]
    SmallFileDiffers,
    #[error("the record of what is finished here does not parse: {}", escaped_message(message))]
    ProgressSyntax { message: String },
    #[error("another coliconv is working on this directory")]
    Locked,
    #[error("another coliconv is working on this part")]
    PartLocked,
    #[error("the lock was removed while this run held it, so another coliconv may be working here, too")]
    LockRemoved,
    #[error("the conversion is divided into {expected} parts; this is one of {found}")]
    OtherDivision { expected: usize, found: usize },
    #[error("{} not finished: {}", are(*files as u64, "file"), listed(missing))]
    PartsMissing { files: usize, missing: Vec<String> },
    #[error("the name differs from {} only in case: on many systems both are one file", escaped(other))]
    NamesDifferInCase { other: String },
    #[error("the file of the container is a link, so it would be lost with what it leads to")]
    OutputIsLink,
    #[error("the file is a link to {}: removing it would free no space", escaped_whole(&target.to_string_lossy()))]
    ConsumedLink { target: PathBuf },
    #[error("the index does not name the file: once it is consumed, no later run could tell what it held")]
    ConsumedUnindexed,
    #[error("the file stays in spite of --consume: it holds {} of the {passes}, which this run does not convert", counted(*tensors as u64, "tensor"))]
    NotConsumed { tensors: usize, passes: String },
    #[error("the source file is from @{}, but was from @{} when {} was made from it", seconds(*found), seconds(*expected), escaped_whole(&container.to_string_lossy()))]
    SourceTouched { container: PathBuf, expected: u64, found: u64 },
    #[error("interrupted; what is finished is kept")]
    Interrupted,
    #[error("nothing has arrived for {minutes} minutes; still missing: {}", listed(waiting))]
    NothingArrives { minutes: u64, waiting: Vec<String> },
    #[error("{one} and {other} cannot be given together: {why}")]
    FlagsExclude { one: &'static str, other: &'static str, why: &'static str },
    #[error("not enough space: {needed} bytes needed, {free} free")]
    NoSpace { needed: u64, free: u64 },
    #[error("the file changed while it was read: {what} was {}, now {}", measured(what, *expected), measured(what, *found))]
    SourceChanged { what: &'static str, expected: u64, found: u64 },
    #[error("version {found} of the file, this program knows {expected}")]
    FileVersion { expected: u64, found: u64 },

    // ---- containers --------------------------------------------------------------------------------------------
    #[error("the stamps do not parse: {}", escaped_message(message))]
    StampSyntax { message: String },
    #[error("two stamps: {} and {}", escaped(one), escaped(other))]
    StampConflict { one: String, other: String },
    #[error("the dtype is {found}, expected {expected}")]
    StoredDtype { expected: &'static str, found: Dtype },
    #[error("the shape is {found}, expected a flat [{expected}]")]
    StoredShape { expected: u64, found: Shape },
    #[error("{dtype} is an element type that the colibri engine does not read")]
    EngineDtype { dtype: Dtype },
    #[error("{shape} as {format} takes {} bytes of codes and {} of scales, found {} and {}", expected.codes, expected.scales, found.codes, found.scales)]
    StoredBytes { shape: Shape, format: Format, expected: ByteCounts, found: ByteCounts, fitting: Vec<Format> },
    #[error("no format stores {shape} in {} bytes of codes and {} of scales; {}", found.codes, found.scales, needs(near))]
    NoFormat { shape: Shape, found: ByteCounts, near: Vec<(Format, ByteCounts)> },
    #[error("{shape} is stored in bytes that fit {}; the colibri engine takes it for {taken}", listed(candidates))]
    Ambiguous { shape: Shape, candidates: Vec<Format>, taken: Format },
    #[error("{shape} is {format}; the colibri engine misreads it: {taken}")]
    EngineMisreads { shape: Shape, format: Format, taken: String },
    #[error("the stamp says `{}`, which is no format", escaped(stamp))]
    StampUnknown { stamp: String },
    #[error("the stamp says {}, the bytes say {by_bytes}: the colibri engine refuses the container", escaped(stamp))]
    StampMismatch { stamp: String, by_bytes: Format },
    #[error("the stamp says {}, the manifest {manifest}", escaped(stamp))]
    StampAgainstManifest { stamp: String, manifest: Format },
    #[error("a stamp for a tensor that {why}")]
    StampIdle { why: &'static str },
    #[error("quantized codes without scales: {scales} is nowhere")]
    QuantizedScaleMissing { scales: TensorName },
    #[error("scales without codes: {codes} is nowhere or is not quantized")]
    QuantizedScaleOrphan { codes: TensorName },
    #[error("the scales are in {}, the codes in {}", escaped(scales), escaped(codes))]
    ScalesApart { codes: String, scales: String },
    #[error("the series {series}… has {found} files up to number {last}: {} missing", listed(missing))]
    NumberingGap { series: &'static str, found: usize, last: usize, missing: Vec<String> },
    #[error("the manifest names the file {}, which is not a plain file name", escaped(found))]
    ManifestPath { found: String },
    #[error("the manifest names the file twice")]
    ManifestFileTwice,
    #[error("the manifest gives no {what} for the tensor")]
    ManifestIncomplete { what: &'static str },
    #[error("the manifest names this file, which is missing")]
    ManifestFileMissing,
    #[error("the manifest gives {expected} bytes, the file has {found}")]
    ManifestFileSize { expected: u64, found: u64 },
    #[error("the manifest does not name this file")]
    ManifestFileUnknown,
    #[error("the manifest names the tensor, no file holds it")]
    ManifestTensorMissing,
    #[error("the manifest does not name the tensor")]
    ManifestTensorUnknown,
    #[error("the manifest says {what} {}, the file {}", escaped(expected), escaped(found))]
    ManifestTensorDiffers { what: &'static str, expected: String, found: String },
    #[error("the manifest gives a format that does not exist: {}", escaped(found))]
    ManifestFormat { found: String },
    #[error("a conversion of this directory was begun and is not finished")]
    ConversionUnfinished,
    #[error("config.json still describes the source's quantization ({})", escaped(method))]
    StaleQuantization { method: String },
    #[error("the census was not taken: {files} files could not be read")]
    CensusIncomplete { files: usize },
    #[error("an MTP head of {format}: columns {begin}..{end} are all zero, so no draft can be accepted")]
    HeadHalfZero { format: Format, begin: u64, end: u64 },

    // ---- payload -----------------------------------------------------------------------------------------------
    #[error("the SHA-256 is {found}, the manifest says {expected}")]
    FileHash { expected: String, found: String },
    #[error("the checksum of the {part} is {found}, the manifest says {expected}")]
    TensorChecksum { part: &'static str, expected: String, found: String },
    #[error("scale {index} (row {row}) is {value}; scales are positive and finite; {} not", are(*count, "scale"))]
    BadScale { index: u64, row: u64, value: f32, count: u64 },
    #[error("row {row}, column {column} is {value}; {} not finite", are(*count, "value"))]
    BadValue { row: u64, column: u64, value: f32, count: u64 },
    #[error("{} all zero, the first is row {row}", are(*count, "row"))]
    ZeroRows { count: u64, row: u64 },
    #[error("columns {begin}..{end} are all zero, while the others are not")]
    ZeroColumns { begin: u64, end: u64 },
    #[error("{} {code}, which no symmetric quantizer writes; the first is in row {row}", are(*count, "code"))]
    UnusualCode { code: i8, count: u64, row: u64 },
    #[error("the padding after column {columns} is not as {format} demands in {}, the first is row {row}", counted(*count, "row"))]
    Padding { format: Format, columns: u64, count: u64, row: u64 },
    #[error(
        "{count} weights are more than half a step from the source; the worst is row {row}, column {column}: {found}, the source has {expected}, half a step is {half_step}"
    )]
    NotTheSource { count: u64, row: u64, column: u64, expected: f32, found: f32, half_step: f32 },
    #[error("`{}` is {}, the source has {}", escaped(key), escaped(found), escaped(expected))]
    ConfigNotTheSource { key: String, expected: String, found: String },
    #[error("the weights are the source's, but only {matched} of {total} predictions are")]
    SourceTokensDiffer { matched: u64, total: u64 },
    #[error("the source has no such tensor")]
    NotInSource,
    #[error("the format is not known, so there are no values")]
    FormatUnknown,
    #[error("{format} cannot be decoded yet")]
    NotDecoded { format: Format },

    // ---- running a model ---------------------------------------------------------------------------------------
    #[error("--mode {mode} is not available on {}", escaped(device))]
    ModeNotAvailable { mode: &'static str, device: String },
    #[error("the {backend} backend does not compute {format}")]
    BackendFormat { backend: &'static str, format: Format },
    #[error("{purpose} would be a buffer of {bytes} bytes, the device has at most {limit} in one")]
    GpuBuffer { bytes: u64, limit: u64, purpose: String },
    #[error("{kernel} would run in {found} groups, the device takes at most {limit}")]
    GpuGroups { kernel: String, found: u32, limit: u32 },
    #[error("{what} are {found}, a GPU computes at most {limit}")]
    GpuDimension { what: &'static str, found: usize, limit: usize },
    #[error("{device} is not used: {}", escaped_message(reason))]
    DeviceUnused { device: String, reason: String },
    #[error("the tokenizer has token {id}, which is not below vocab_size {vocab_size} of config.json")]
    TokenizerVocab { id: u32, vocab_size: u64 },
    #[error("the weights to measure with take {needed} bytes of memory, {available} are available")]
    BenchMemory { needed: u64, available: u64 },
    #[error("this run was to fail: launch {launch}, {kernel}, was made wrong on purpose")]
    GpuFaultMade { launch: u64, kernel: String },
    #[error("launch {launch}, {kernel}, was made wrong on purpose, and nothing that was compared depends on it")]
    GpuFaultUnnoticed { launch: u64, kernel: String },
    #[error("no fault was made: launch {launch} was to be wrong, there were {launches}")]
    GpuNotInjected { launch: u64, launches: u64 },
    #[error("launch {launch}, {kernel}, was made to fail")]
    GpuInjected { kernel: String, launch: u64 },
    #[error("the model has no MTP head")]
    NoMtpHead,
    #[error("there is no token to start from")]
    NoTokens,
    #[error("token id {id} is not below vocab_size {vocab_size}")]
    TokenId { id: u64, vocab_size: u64 },
    #[error("the logits of {what}, row {row} of those that were computed together, are not finite")]
    LogitsNotFinite { what: &'static str, row: usize },
    #[error("the tokenizer does not load: {message}")]
    TokenizerSyntax { message: String },
    #[error("the tokenizer cannot {action}: {message}")]
    Tokenizer { action: &'static str, message: String },
    #[error("the tokenizer has no token with id {id}")]
    TokenUnknown { id: u32 },

    // ---- generating --------------------------------------------------------------------------------------------
    #[error("the prompt is empty")]
    PromptEmpty,
    #[error(
        "the prompt has {tokens} tokens and {} to follow, together {}; the model takes at most {limit}",
        if *max_tokens == 1 { "1 is".to_owned() } else { format!("up to {max_tokens} are") },
        tokens.saturating_add(*max_tokens)
    )]
    PromptTooLong { tokens: usize, max_tokens: usize, limit: u64 },
    #[error(
        "the model has no chat template: neither chat_template.jinja nor `chat_template` of tokenizer_config.json is there"
    )]
    NoChatTemplate,
    #[error("{}the chat template fails: {}", line.map(|line| format!("line {line}: ")).unwrap_or_default(), escaped_message(message))]
    ChatTemplate { line: Option<usize>, message: String },
    #[error(
        "the model and a text of up to {tokens} tokens, prompt included, need {needed} bytes of memory at least, {available} are available"
    )]
    GenerationTooLarge { tokens: u64, needed: u64, available: u64 },
    #[error("interrupted after {tokens} tokens")]
    GenerationInterrupted { tokens: usize },
    #[error(
        "the model says {}, for which the tokenizer has no token: nothing stands for them in the text",
        listed(ids)
    )]
    GeneratedUnknown { ids: Vec<u32> },
    #[error(
        "--verify needs {needed} bytes of memory for the container and what it is compared with, {available} are available"
    )]
    VerifyTooLarge { needed: u64, available: u64 },

    // ---- references --------------------------------------------------------------------------------------------
    #[error("reference {reference}: `{key}` is missing")]
    ReferenceMissing { reference: usize, key: &'static str },
    #[error("reference {reference}: `{key}` is {}, expected {expected}", escaped(found))]
    ReferenceValue { reference: usize, key: &'static str, expected: String, found: String },
    #[error("the file has {found} references, expected 1 to {limit}")]
    ReferenceCount { found: usize, limit: usize },
    #[error("reference {reference} carries no fingerprint: it may be of another model")]
    ReferenceAnonymous { reference: usize },
    #[error(
        "reference {reference} is of another model: its fingerprint is {}, this model's {expected}",
        escaped(found)
    )]
    ReferenceFingerprint { reference: usize, expected: String, found: String },
    #[error(
        "reference {reference} has {tokens} tokens and index_topk {index_topk}, but the model has no indexer and attends to all of them"
    )]
    NoIndexer { reference: usize, tokens: usize, index_topk: u64 },
    #[error("none of {proposed} drafts of the MTP head is what the model says next")]
    NoDraftAccepted { proposed: usize },
    #[error("the model needs {needed} bytes of memory, {available} are available")]
    ModelTooLarge { needed: u64, available: u64 },
    #[error(
        "routed experts need {needed} bytes of memory to be read one after the other, {available} are left for them"
    )]
    ExpertsMemory { needed: u64, available: u64 },
    #[error(
        "at least {} bytes of memory are needed: {experts} for routed experts, one after the other, and {fixed} for all else; there are {available}",
        fixed.saturating_add(*experts)
    )]
    MemoryTooSmall { fixed: u64, experts: u64, available: u64 },
    #[error(
        "reference {reference}: {equal} of {total} {what} are equal; the first that is not is number {at}: expected {expected}, found {found}"
    )]
    TokensDiffer {
        reference: usize,
        what: &'static str,
        equal: usize,
        total: usize,
        at: usize,
        expected: u32,
        found: u32,
    },
    #[error("reference {reference}: a log-probability differs by {found:.3e}, at most {tolerance:.0e} is rounding")]
    LogprobsDiffer { reference: usize, found: f64, tolerance: f64 },

    // ---- scoring -----------------------------------------------------------------------------------------------
    #[error("there is nothing to score")]
    NothingToScore,
    #[error("the name {} is given twice", escaped(name))]
    InputNameTwice { name: String },
    #[error("{flag} says nothing without {needs}")]
    FlagNeeds { flag: &'static str, needs: &'static str },
    #[error("row {row}: expected {expected}, found {}", escaped(found))]
    RowMalformed { row: u64, expected: String, found: String },
    #[error("row {row}: expected {expected}, found {}", escaped(found))]
    RowUnanswered { row: u64, expected: String, found: String },
    #[error("row {row} has {tokens} tokens, the model takes at most {limit}")]
    RowTooLong { row: u64, tokens: usize, limit: u64 },
    #[error("row {row}: the continuation has no token")]
    RowEmpty { row: u64 },
    #[error("row {row}: no token stands before the continuation, so its first token has no probability")]
    RowNoContext { row: u64 },
    #[error("row {row}: token id {id} is not below vocab_size {vocab_size}")]
    RowTokenId { row: u64, id: u64, vocab_size: u64 },
    #[error("row {row}: the logits are not finite")]
    RowNotFinite { row: u64 },
    #[error("none of the {rows} rows can be scored; the first: {first}")]
    NoGoodRow { rows: u64, first: String, unanswered: bool },
    #[error("the file has no rows")]
    NoRows,
    #[error("the rows are of no known task: they have the keys {}", listed(keys))]
    TaskUnknown { keys: Vec<String> },
    #[error("the Parquet file does not read: {}", escaped_message(message))]
    ParquetSyntax { message: String },
    #[error("the tokenizer has no token {token}, with which texts of this model begin")]
    PrefixUnknown { token: &'static str },
    #[error("line {line}: the results are damaged: {}", escaped_message(message))]
    ResultsDamaged { line: u64, message: String },
    #[error("the results are of another run: {what} is {}, this run's is {}", escaped(found), escaped(expected))]
    ResultsOther { what: String, expected: String, found: String },
    #[error("{missing} of {total} results are missing")]
    ResultsIncomplete { missing: u64, total: u64 },
    #[error("there are no results of parts that could be joined")]
    NothingToJoin,
    #[error("the results of {} are missing: {}", counted(missing.len() as u64, "part"), listed(missing))]
    ScorePartsMissing { missing: Vec<String> },
    #[error("{rows} of {total} rows are scored, but not compared with this baseline")]
    ResultsNotCompared { rows: u64, total: u64 },
    #[error(
        "the baseline's results are of other rows: {what} is {}, this run's is {}",
        escaped(found),
        escaped(expected)
    )]
    BaselineOther { what: String, expected: String, found: String },
    #[error("the baseline holds neither results nor weights")]
    BaselineEmpty,
    #[error("the baseline is the directory that this run writes")]
    BaselineIsOut,
    #[error("the baseline is the same model: the hash of both is {hash}")]
    BaselineSameModel { hash: String },
    #[error("results are written into a directory, and this is none")]
    OutNotDirectory,
    #[error("the file is compressed with gzip")]
    InputCompressed,
    #[error("the file is Parquet, and {flag} takes text")]
    InputParquet { flag: &'static str },
    #[error("the file begins with a byte order mark")]
    InputByteOrderMark,
    #[error("the file is one JSON array, not a row a line")]
    InputArray,
    #[error("the file exists and is not of score results")]
    NotResults,
    #[error("the baseline has another tokenizer: its hash is {}, this model's {}", escaped(found), escaped(expected))]
    BaselineTokenizer { expected: String, found: String },
    #[error("the results cannot stand in the directory of the model")]
    ResultsInModel,
    #[error("the report cannot stand in the directory of the model")]
    ReportInModel,

    // ---- comparing and verifying -------------------------------------------------------------------------------
    #[error("the level {level} compares a container with its source")]
    SourceNeeded { level: &'static str },
    #[error("{flag} has no use at the level {level}")]
    FlagUnused { flag: &'static str, level: &'static str },
    #[error("a checkpoint has nothing to be compared with at the level {level}")]
    LevelOfContainers { level: &'static str },
    #[error("the source is another model: {tensors} of the container's tensors are not there or have another shape; this one is {}, the container's is {container}", source_shape.as_ref().map_or("missing".to_owned(), Shape::to_string))]
    OtherModel { tensors: usize, container: Shape, source_shape: Option<Shape> },
    #[error("the tensors' checksums are {}, this program knows {expected}", escaped(found))]
    ChecksumUnknown { expected: &'static str, found: String },
    #[error(
        "the model was changed while it was verified: its {} was {}, now it is {}",
        escaped(what),
        escaped(expected),
        escaped(found)
    )]
    ChangedMeanwhile { what: String, expected: String, found: String },
    #[error("the file exists")]
    FileExists,
    #[error("the file exists and is no report of this command")]
    OtherReport,
    #[error("there are no reports of parts beside it, as {} would be", escaped(expected))]
    VerifyPartsAbsent { expected: String },
    #[error("the reports of {} are missing: {}", counted(missing.len() as u64, "part"), listed(missing))]
    VerifyPartsMissing { missing: Vec<String> },
    #[error("beside it are reports of a verification in {one} parts and of one in {other}")]
    VerifyPartsMixed { one: usize, other: usize },
    #[error(
        "the report is of another verification: its {} is {}, here it is {}",
        escaped(what),
        escaped(found),
        escaped(expected)
    )]
    VerifyPartDiffers { what: String, expected: String, found: String },

    // ---- publishing --------------------------------------------------------------------------------------------
    #[error("the pipeline does not parse: {}", escaped_message(message))]
    PipelineSyntax { message: String },
    #[error("there is no such file")]
    InputAbsent,
    #[error("the policy does not parse: {}", escaped_message(message))]
    PolicySyntax { message: String },
    #[error(
        "the file is no report of `coliconv verify` or `coliconv score` of this version: {}",
        escaped_message(message)
    )]
    NotAReport { message: String },
    #[error("this is a directory, not the report of `coliconv verify` or `coliconv score`")]
    ReportDirectory { file: Option<String> },
    #[error("{what} is missing")]
    EvidenceMissing { what: &'static str, command: String },
    #[error("the manifest does not name this, and an upload would take it along")]
    NotOfContainer,
    #[error("the manifest has keys that this program does not write, or lacks some that it does")]
    ManifestForeignKeys,
    #[error("the report does not say which bytes and which manifest it is about")]
    ReportUnbound { command: String },
    #[error("the report is of other bytes: {} was {}, now it is {}", escaped(what), escaped(found), escaped(expected))]
    ReportOfOtherBytes { what: String, expected: String, found: String },
    #[error("the report contradicts itself: {} is {}, expected {}", escaped(what), escaped(found), escaped(expected))]
    ReportContradicts { what: String, expected: String, found: String },
    #[error("the baseline is {}, not the source: a checkpoint", escaped(found))]
    BaselineNotSource { found: String },
    #[error(
        "the baseline is another model than the source: its hash is {}, the source's {}",
        escaped(found),
        escaped(expected)
    )]
    BaselineOtherSource { expected: String, found: String },
    #[error("the reference was written by this very container, so it proves nothing")]
    ReferenceOfItself,
    #[error("the report is of part {} alone", escaped(part))]
    ReportOfPart { part: String, command: &'static str },
    #[error("the verdict of this report is fail")]
    ReportSaysNo,
    #[error("{device} was asked for, but the {} backend computed in its place", escaped(backend))]
    DeviceNotUsed { device: String, backend: String },
    #[error("{} is {}, the policy asks for {}", escaped(what), escaped(found), escaped(expected))]
    PolicyMissed { what: String, expected: String, found: String },
    #[error("the model card has been changed: its SHA-256 is {found}, the manifest says {expected}")]
    CardChanged { expected: String, found: String },
    #[error("the YAML at the top of the card does not parse: {}", escaped_message(message))]
    CardSyntax { message: String },
    #[error("the card is missing, so what it says of the licence and the base model is not known")]
    CardMissing,
    #[error(
        "there is a {other}, too, and `publish` wants this name for the source's card: one of the two would be lost"
    )]
    TwoCards { other: &'static str },
    #[error("no licence is known: there is neither a card with `license` nor a file LICENSE")]
    LicenseUnknown,
    #[error("`license_link` of the source's card names {}, which the container does not have", escaped(found))]
    LicenseLinkDead { found: String },
    #[error("the model that this one was made from is not known by its name on the Hub")]
    BaseModelUnknown,
    #[error("the file has {found} bytes; the Hub takes at most {limit}")]
    TooLargeForHub { limit: u64, found: u64 },
    #[error("the file exists and is not a list of checksums that `coliconv publish` wrote")]
    SumsForeign,
    #[error("the pages cannot be written here: not a directory")]
    PagesNotDirectory,
    #[error("the name holds control characters or a backslash, so the file is not carried along")]
    NameNotCarried,
    #[error("`{key}` is false, and the source has {what}: the container is made without")]
    PassLeftOut { key: &'static str, what: &'static str },
    #[error(
        "`{key}` is false, but the container has {what} of an earlier run: it stays, and is verified and published"
    )]
    PassStays { key: &'static str, what: &'static str },
    #[error("the policy asks for no accepted drafts: whether the MTP head is of any use is not looked at")]
    DraftsUnasked,
    #[error("the directory lies within that of the {}, {}", what, escaped_whole(outer))]
    NestedDirectory { what: &'static str, outer: String },
    #[error("the listing does not parse: {}", escaped_message(message))]
    ListingSyntax { message: String },
    #[error(
        "the listing has neither sizes nor hashes, of {} only the name; the first is {}",
        if *files == 1 { "the one file".to_owned() } else { format!("all {files} files") },
        escaped(name)
    )]
    ListingNames { files: usize, name: String },
    #[error("the repository has {found} bytes of this file, the container {expected}")]
    ListingSize { expected: u64, found: u64 },
    #[error("the {what} is {} in the repository, {expected} in the container", escaped(found))]
    ListingHash { what: &'static str, expected: String, found: String },
    #[error("the listing gives neither a SHA-256 nor a git blob id")]
    ListingNoHash,
    #[error("the listing names the file twice")]
    ListingTwice,
    #[error("the repository does not have this file")]
    ListingMissing,
    #[error("the repository has this file, the container does not")]
    ListingExtra,

    // ---- GPUs --------------------------------------------------------------------------------------------------
    #[error("{api} cannot be used: no library {library} can be loaded: {}", escaped_message(message))]
    GpuLibrary { api: &'static str, library: &'static str, message: String },
    #[error("{api} cannot be used: the driver is too old, its library lacks {symbol}")]
    GpuSymbol { api: &'static str, symbol: &'static str },
    #[error("there is no device {api}:{asked}: {} found", are(*found as u64, "device"))]
    GpuOrdinal { api: &'static str, asked: usize, found: usize },
    #[error("{}: {what} is {found}, at least {expected} is needed", escaped(device))]
    GpuTooOld { device: String, what: &'static str, found: String, expected: &'static str },
    #[error("{}: cannot {doing}: {call} says {}{}", escaped(device), escaped(code), after(launched))]
    GpuCall { device: String, doing: String, call: &'static str, code: String, launched: Option<(u64, String)> },
    #[error(
        "{}: {purpose} needs {wanted} bytes of the GPU's memory, --device-memory allows {allowed}",
        escaped(device)
    )]
    GpuMemoryLimit { device: String, purpose: String, wanted: u64, allowed: u64 },
    #[error("{}: no memory for {purpose}: {wanted} bytes are wanted, {free} of {total} are free", escaped(device))]
    GpuMemory { device: String, purpose: String, wanted: u64, free: u64, total: u64 },
    #[error(
        "{}: routed experts need at least {needed} bytes of the GPU's memory, for one at a time; {available} are left for them",
        escaped(device)
    )]
    GpuExpertsMemory { device: String, needed: u64, available: u64 },
    #[error(
        "no memory for the model with one routed expert at a time: layers, embedding and output head take {wanted} bytes, and {layer}, {bytes} of them, finds no place: {}; {}",
        escaped_message(devices), enough(*least, *by_limit)
    )]
    GpusMemory { layer: String, bytes: u64, wanted: u64, devices: String, least: u64, by_limit: bool },
    #[error("{api} cannot be used: {}", escaped_message(reason))]
    GpuApi { api: &'static str, reason: String },
    #[error("{} cannot be used: {what}: expected at least {expected}, found {found}", escaped(device))]
    GpuLacks { device: String, what: &'static str, expected: String, found: String },
    #[error("{}: cannot {doing} within {seconds} s", escaped(device))]
    GpuTimeout { device: String, doing: String, seconds: u64 },
    #[error("{}: cannot {doing}: the validation layers say: {}", escaped(device), escaped_message(message))]
    GpuValidation { device: String, doing: String, message: String },
    #[error("{}: no kernel {kernel} was made for it", escaped(device))]
    GpuKernel { device: String, kernel: String },
}

impl FaultKind {
    /// The name in JSON reports.
    pub fn name(&self) -> &'static str {
        self.into()
    }

    /// The operating system's error, where there is one.
    pub(super) fn source_error(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            FaultKind::Io { source, .. } => Some(source),
            _ => None,
        }
    }

    /// What a person can do about it.
    pub fn hint(&self) -> Option<String> {
        super::hint::hint(self)
    }
}

/// Nanoseconds as seconds.
fn measured(what: &str, value: u64) -> String {
    if what.ends_with("modification time") { seconds(value) } else { value.to_string() }
}

fn seconds(nanoseconds: u64) -> String {
    format!("{}.{:09}", nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000)
}

/// `1 row`, `2 rows`.
pub(crate) fn counted<N: std::fmt::Display + PartialEq + From<u8>>(count: N, noun: &str) -> String {
    let ending = if count == N::from(1) { "" } else { "s" };
    format!("{count} {noun}{ending}")
}

/// `1 row is`, `2 rows are`.
fn are(count: u64, noun: &str) -> String {
    format!("{} {}", counted(count, noun), if count == 1 { "is" } else { "are" })
}

/// Kernels that may be the reason of an error that shows later: how many, and the last of them.
fn after(launched: &Option<(u64, String)>) -> String {
    launched.as_ref().map_or(String::new(), |(count, last)| match count {
        1 => format!(", which may come from the kernel {last}, started before"),
        _ => format!(", which may come from any of {count} kernels started since the last wait, {last} being the last"),
    })
}

/// The least that would do on several GPUs.
fn enough(least: u64, by_limit: bool) -> String {
    match by_limit {
        true => format!("--device-memory {least} would do"),
        false => format!("{least} bytes free on each would do"),
    }
}

/// What formats of the right code bytes need.
fn needs(near: &[(Format, ByteCounts)]) -> String {
    let each: Vec<String> =
        near.iter().map(|(format, bytes)| format!("{format} needs {} and {}", bytes.codes, bytes.scales)).collect();
    each.join(", ")
}
