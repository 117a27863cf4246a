//! What a person can do about a fault, one line each.

use super::{FaultKind, listed};

/// The hint for a kind of fault, where a person can act.
pub(super) fn hint(kind: &FaultKind) -> Option<String> {
    use FaultKind as K;
    let text = match kind {
        K::Io { source, .. } => return io_hint(source),
        K::FileShrank { .. } | K::SourceChanged { .. } => "let whatever writes the file finish, then run again".into(),
        K::DanglingLink => "download the file again, or remove the link".into(),
        K::NotFound | K::NotADirectory => "give the directory that holds config.json and the .safetensors files".into(),
        K::GitLfsPointer => "run `git lfs pull`, or download the file itself".into(),
        K::HeaderTruncated { .. }
        | K::HeaderLength { .. }
        | K::HeaderTooLarge { .. }
        | K::HeaderNotUtf8
        | K::HeaderNotObject { .. }
        | K::HeaderSyntax { .. }
        | K::DataTruncated { .. } => "the file is truncated or is not a safetensors file: download it again".into(),
        kind if is_broken_header(kind) => {
            "the file was written by a broken tool or damaged: download or make it again".into()
        }
        K::NameUnprintable => "no model has such a name: ask where the file comes from".into(),
        K::DuplicateInFiles { .. } | K::TensorElsewhere { .. } => {
            "remove the file that does not belong to the model".into()
        }
        K::IndexWrongFile { .. } | K::TensorNotInShard | K::ShardMissing { .. } | K::TensorNotInIndex => {
            "download the file and model.safetensors.index.json again, from the same revision".into()
        }
        K::IndexMissing { .. } | K::IndexSyntax { .. } | K::DuplicateInIndex | K::IndexPath { .. } => {
            "download model.safetensors.index.json from the same repository".into()
        }
        K::FileNotInIndex { .. } => "remove the file if it does not belong to the model".into(),
        K::TotalSize { .. } | K::TotalSizeMissing => {
            "nothing depends on it: the weights are read by their headers".into()
        }
        K::Unfinished => "wait for the download to end, or remove the file".into(),
        K::ModelType { .. } => "only the GLM-5 family (glm_moe_dsa) is converted".into(),
        K::JsonSyntax { .. } => "the file is damaged: take it again from where it came, or make it again".into(),
        K::ConfigMissing { key } => format!("take `{key}` from the model's original config.json"),
        K::ConfigValue { .. } => "take the file from the model's repository".into(),
        K::ConfigSilent { key, .. } => format!("take `{key}` from the model's original config.json"),
        K::NoStopIds => "copy generation_config.json from the model's repository".into(),
        K::SmallFileMissing { .. } | K::ConfigAbsent => "copy it from the model's repository".into(),
        K::PassAbsent { what: "of the hidden layers" } => {
            "the model is incomplete: compare the file list with the model's repository".into()
        }
        K::TensorMissing { .. } | K::LayerMissing { .. } | K::IndexerMissing { .. } | K::ExpertMissing { .. } => {
            "the model is incomplete: compare the file list with the model's repository".into()
        }
        K::HeadMissing => "download the file that holds it, or take config.json from the model's repository".into(),
        K::HeadTied => "set `tie_word_embeddings` to false to keep the head, or remove it to tie it".into(),
        K::ShapeMismatch { .. } => "config.json and the weights are of different models".into(),
        K::NestedTensor { .. } => {
            "names nested under another prefix are not converted: extract the language model first".into()
        }
        K::UnknownTensor => {
            "remove what does not belong to the model, or check that config.json is this model's".into()
        }
        K::SourceFormat { .. } | K::SourceDtype { .. } | K::SourceQuantization { .. } => {
            "start from the FP8 (128 × 128 blocks) or BF16 checkpoint".into()
        }
        K::ScaleMissing { .. } => {
            "without its scales the weight would be wrong by a factor of thousands: download the missing file".into()
        }
        K::ScaleGrid { .. } => {
            "the scales belong to another quantization method: start from the FP8 (128 × 128 blocks) or BF16 checkpoint"
                .into()
        }
        K::NonFinite { .. } => "--allow-non-finite counts such elements as 0 and lists them".into(),
        K::SourceIsContainer { .. } => "give the FP8 or BF16 checkpoint it was made from".into(),
        K::Bits { .. } => "give 8, 7, 6 or 5 (int8 storage), 4, 3 or 2".into(),
        K::TwoBitsGrouped { .. } => {
            "use --group-size row with 2 bits, 3 bits (which have groups of 64 of their own), or a recipe rule".into()
        }
        K::GroupSize { .. } => "64 is the common choice".into(),
        K::RuleUnused { .. } => {
            "`coliconv inspect` lists the names; norms, router and biases stay f32 and cannot be named".into()
        }
        K::RuleFormat { .. } => {
            "formats: f32, int8-row, int4-row, int4-grouped with group_size, int3-g64, int2-row".into()
        }
        K::RecipeConflict { .. } => "leave the flag out, or change the recipe".into(),
        K::HeadFormat { .. } => "leave the head at int8-row, or use int4-grouped".into(),
        K::Misread { safe, .. } if safe.is_empty() => {
            "int8 (8 bits) is read correctly at any width; --allow-ambiguous writes it all the same".into()
        }
        K::Misread { safe, shape, .. } => format!(
            "for {shape} group size {} would be read correctly; --allow-ambiguous writes it all the same",
            listed(safe)
        ),
        K::DestinationUsed { .. } | K::OtherParameters { .. } | K::OtherSource { .. } | K::OutputExists => {
            "choose another, empty directory; nothing existing is overwritten".into()
        }
        K::PassUnfinished { .. } => "run the command of that pass again first, or both passes together".into(),
        K::OutputChanged { .. } => "move the damaged file away and run again: it is written anew".into(),
        K::SameDirectory | K::SameFile { .. } | K::DestinationIsFile => {
            "choose another directory for the container".into()
        }
        K::SmallFileDiffers => {
            "restore it here or in the source; or move it away, and that of the source is carried along".into()
        }
        K::NotAFile => "replace it by a regular file, or remove it".into(),
        K::WeightFileName => "rename it, or remove it if it does not belong to the model".into(),
        K::NoSpace { .. } => "free the space, or choose another disk".into(),
        K::ProgressSyntax { .. } => {
            "it alone tells which files are whole: remove what was written here, or choose another directory".into()
        }
        K::Locked | K::PartLocked => "wait for it to end".into(),
        K::LockRemoved => "see that no other run is left, then run again; a lock that nobody holds stops nobody".into(),
        K::OtherDivision { expected, .. } => {
            format!("give --part K/{expected}, or no --part to convert all that is left, or another directory")
        }
        K::PartsMissing { .. } => {
            "run the missing parts, or the command without --part and --finish to convert all that is left".into()
        }
        K::NamesDifferInCase { .. } => "rename or remove one of them".into(),
        K::OutputIsLink => "replace it by the file itself".into(),
        K::ConsumedLink { .. } => "give the directory that holds the files themselves, or leave out --consume".into(),
        K::ConsumedUnindexed => "leave out --consume, and remove the file yourself at the end".into(),
        K::NotConsumed { .. } => "add --mtp and --indexer to convert everything, or remove it yourself".into(),
        K::SourceTouched { .. } => {
            "if it is the same file, give it its time back: touch -d @TIME FILE; else choose another directory".into()
        }
        K::Interrupted => "run the same command again to go on".into(),
        K::NothingArrives { .. } => "see what the downloader does, then run the same command again".into(),
        K::FileVersion { .. } => "use the version of coliconv that wrote it, or choose another directory".into(),
        K::EmptyPass { .. } => "leave the pass out, or give a checkpoint that has these weights".into(),
        K::StoredBytes { fitting, .. } if !fitting.is_empty() => format!("these bytes would fit {}", listed(fitting)),
        K::NoFormat { .. } | K::StoredBytes { .. } => {
            "the tensor is damaged, or config.json is of another model".into()
        }
        K::Ambiguous { .. } => "a manifest or a stamp would say which it is".into(),
        K::EngineMisreads { .. } => "convert again with a group size that is read correctly".into(),
        K::StampSyntax { .. } | K::StampConflict { .. } | K::StampAgainstManifest { .. } => {
            "convert again: the engine opens no such container".into()
        }
        K::EngineLimit { what: "stamps", .. } => "stamp resident tensors only, never routed experts".into(),
        K::StampIdle { .. } => "nothing depends on it".into(),
        K::StampMismatch { .. } | K::StampUnknown { .. } => "convert again: the engine opens no such container".into(),
        K::StoredDtype { found: crate::tensor::Dtype::F16, .. } => {
            "F16 scales have the byte count of twice the group size and would be misread silently".into()
        }
        kind if is_broken_manifest(kind) => {
            "download the manifest again with the files that it belongs to, or convert again".into()
        }
        K::StoredDtype { .. } | K::EngineDtype { .. } => {
            "convert again: codes are U8, their scales F32, everything else F32".into()
        }
        K::StoredShape { .. } => "codes and scales are flat: another tool wrote them, or convert again".into(),
        K::QuantizedScaleMissing { .. } | K::QuantizedScaleOrphan { .. } => {
            "download the file that holds the other half, or convert again".into()
        }
        K::ScalesApart { .. } => "convert again to have them side by side".into(),
        K::ZeroRows { .. } | K::ZeroColumns { .. } => "see whether they are zero in the source, too".into(),
        K::UnusualCode { .. } => "another converter wrote it, or the file is damaged: see its checksum".into(),
        K::Padding { .. } => "convert the tensor again: another tool wrote it, or the file is damaged".into(),
        K::NumberingGap { .. } | K::ManifestFileMissing => "download or convert the missing files".into(),
        K::ManifestFileSize { .. } | K::FileHash { .. } | K::TensorChecksum { .. } => {
            "the file has changed since it was converted: download or convert it again".into()
        }
        K::ConversionUnfinished => "run the same convert command again to finish it".into(),
        K::StaleQuantization { .. } => {
            "remove `quantization_config` from config.json: the weights are no longer FP8".into()
        }
        K::HeadHalfZero { .. } => {
            "convert the head again: int8-row is what `coliconv convert --only mtp` writes".into()
        }
        K::BadScale { .. } | K::BadValue { .. } => "convert the tensor again from a sound source".into(),
        K::ModelTooLarge { .. } | K::MemoryTooSmall { .. } | K::ExpertsMemory { .. } => {
            "--memory raises the limit; `coliconv verify --level payload` needs no model in memory".into()
        }
        K::LogprobsDiffer { tolerance, .. } if *tolerance > 0.01 => {
            "in the fast mode a rounding may change which expert or position is chosen: verify without --mode fast"
                .into()
        }
        K::TokensDiffer { .. } | K::LogprobsDiffer { .. } => {
            "the weights, config.json or the format are not those that the reference was made with".into()
        }
        K::NoIndexer { .. } => "convert the checkpoint with --indexer, or use references of dense attention".into(),
        K::NoDraftAccepted { .. } => {
            "the head is of another checkpoint, damaged, or was never trained: convert it again with --only mtp".into()
        }
        K::ConfigNotTheSource { .. } => "take config.json from the source: other arithmetic gives other tokens".into(),
        K::NoMtpHead => "convert the checkpoint with --mtp, or do without drafts".into(),
        K::LogitsNotFinite { .. } | K::GpuNanCode => {
            "a weight or scale is damaged: `coliconv verify --level payload` names it".into()
        }
        K::TokenId { .. } | K::TokenUnknown { .. } => "the ids are of another model's tokenizer".into(),
        K::TokenizerSyntax { .. } => "copy tokenizer.json from the model's repository".into(),
        K::ReferenceMissing { .. } | K::ReferenceValue { .. } | K::ReferenceCount { .. } => {
            "`coliconv verify --write-reference` writes such a file".into()
        }
        K::ReferenceAnonymous { .. } => "make sure that it was made from this very model".into(),
        K::ReferenceFingerprint { .. } => {
            "config.json or tokenizer.json differ: take the reference that belongs to this model".into()
        }
        K::SourceNeeded { .. } => "give --source CHECKPOINT".into(),
        K::FlagUnused { flag: "--source", level } if level.ends_with("checkpoint") => {
            "leave it out: a checkpoint was made from nothing else".into()
        }
        K::FlagUnused { flag: "--source", .. } => "leave it out, or give --level weights".into(),
        K::FlagUnused { .. } => "leave it out, or give --level tokens".into(),
        K::LevelOfContainers { .. } => "give --level payload, or the container made from it with --source".into(),
        K::ChangedMeanwhile { .. } => "let whatever writes to it finish, then run every part again".into(),
        K::FileExists => "choose another name; nothing existing is overwritten".into(),
        K::OtherReport => "choose another name for the report; only an earlier report is replaced".into(),
        K::OtherModel { .. } => "give the checkpoint that the container was made from".into(),
        K::NotTheSource { .. } => {
            "the tensor was damaged, its scales are another tensor's, or it was made from another checkpoint".into()
        }
        K::PromptEmpty => "give a text; what a text of this model begins with is added to it, see --prefix".into(),
        K::GenerationTooLarge { .. } => "give a lower --max-tokens or a shorter prompt, or a higher --memory".into(),
        K::PromptTooLong { .. } => "shorten the prompt, or give a lower --max-tokens".into(),
        K::NoChatTemplate => "copy chat_template.jinja from the model's repository, or leave out --chat".into(),
        K::ChatTemplate { .. } => {
            "take the template from the model's repository, or write the prompt out and leave out --chat".into()
        }
        K::GeneratedUnknown { .. } => "tokenizer.json may be of another model".into(),
        K::VerifyTooLarge { .. } => {
            "leave out --verify; `coliconv verify --level weights --source` needs no model in memory".into()
        }
        kind => return score_hint(kind),
    };
    Some(text)
}

/// The hint for a fault of scoring.
fn score_hint(kind: &FaultKind) -> Option<String> {
    use FaultKind as K;
    let text = match kind {
        K::NothingToScore => "give --task NAME=FILE, --text NAME=FILE, --requests FILE or --probes".into(),
        K::InputNameTwice { .. } => "every --task and --text needs a name of its own".into(),
        K::FlagNeeds { flag, needs } => format!("give {needs} too, or leave {flag} out"),
        K::RowMalformed { .. } | K::RowEmpty { .. } => "correct the row, or remove it".into(),
        K::RowTooLong { .. } => "shorten the row: nothing is cut off silently".into(),
        K::BenchMemory { .. } => "give a smaller --size".into(),
        K::TokenizerVocab { .. } => "the tokenizer is another model's: copy it from the model's repository".into(),
        K::RowNoContext { .. } => "give the row a context".into(),
        K::RowTokenId { .. } => "the ids are of another model's tokenizer".into(),
        K::RowNotFinite { .. } => "a weight or scale is damaged: check the container with `coliconv verify`".into(),
        K::TaskUnknown { .. } => {
            "a row holds ctx, choices and gold, or the keys that hellaswag, arc, mmlu, winogrande or piqa publish"
                .into()
        }
        K::ParquetSyntax { message } if message.contains("Disabled feature") => {
            "write it again with another compression, for one snappy, or as JSON lines".into()
        }
        K::ParquetSyntax { .. } => "download the file again, or give it as JSON lines".into(),
        K::PrefixUnknown { .. } => "give --prefix none, or the text that this model's texts begin with".into(),
        K::ResultsDamaged { .. } => "score into another directory, or move the damaged results away".into(),
        K::ResultsOther { .. } | K::NotResults | K::ResultsInModel => {
            "score into another directory; nothing existing is mixed or overwritten".into()
        }
        K::ReportInModel => {
            "give a --report outside of it: `publish` refuses a container with files that are not its own".into()
        }
        K::BaselineTokenizer { .. } => "only models with the same tokenizer can be compared".into(),
        K::ResultsIncomplete { .. } => "run the same `coliconv score` again, every part of it, to finish it".into(),
        K::ResultsNotCompared { .. } => {
            "run the same `coliconv score`, or every part of it, with this --baseline and without --finish".into()
        }
        K::BaselineOther { .. } => "score the baseline with the same inputs, --limit, --seed and --prefix".into(),
        K::BaselineIsOut => "give another --out, or as --baseline the directory of the other model's results".into(),
        K::BaselineSameModel { .. } => "nothing can differ: give as --baseline what the model was made from".into(),
        K::BaselineEmpty => {
            "give the --out directory of a finished `coliconv score`, or a checkpoint or container".into()
        }
        K::OutNotDirectory => "give a directory as --out; it is made where there is none".into(),
        K::InputParquet { .. } => "give it as --task, or write its texts into a file of lines".into(),
        K::NoGoodRow { unanswered: true, .. } | K::RowUnanswered { .. } => {
            "test splits are published without answers, and those of piqa in a file of their own: take the validation \
             split, or join the answers to the rows"
                .into()
        }
        K::ScorePartsMissing { .. } | K::NothingToJoin => {
            "run `coliconv score --part K/N` with the same arguments for each part, then --finish".into()
        }
        K::InputCompressed => "decompress it, for one with `gunzip -k FILE`".into(),
        K::InputByteOrderMark => {
            "save it as UTF-8 without a byte order mark, for one with `sed '1s/^\\xEF\\xBB\\xBF//' FILE`".into()
        }
        K::InputArray => "make it JSON lines, for one with `jq -c '.[]' FILE`".into(),
        kind => return publish_hint(kind),
    };
    Some(text)
}

/// The hint for a fault of publishing.
fn publish_hint(kind: &FaultKind) -> Option<String> {
    use FaultKind as K;
    let text = match kind {
        K::PolicySyntax { .. } => "schemas/policy.schema.json lists the keys; what is left out has its default".into(),
        K::PipelineSyntax { .. } => "schemas/pipeline-file.schema.json lists the keys".into(),
        K::InputAbsent => "paths of a pipeline are relative to its file".into(),
        K::NotAReport { .. } => {
            "give what `coliconv verify --report FILE` or `coliconv score --out DIR` (score.json) wrote".into()
        }
        K::ReportDirectory { file: Some(file) } => format!("give the file in it: {}", super::escaped(file)),
        K::ReportDirectory { file: None } => "give the file that `coliconv verify --report FILE` wrote, or score.json".into(),
        K::EvidenceMissing { command, .. } | K::ReportUnbound { command } => format!("run `{command}`"),
        K::ManifestForeignKeys => {
            "publishing writes the manifest anew and would lose them: publish with the program that wrote it, or restore it".into()
        }
        K::NotOfContainer => "move it out of the directory".into(),
        K::ReportOfOtherBytes { .. } => {
            "the container was changed after the report was made: make the report again".into()
        }
        K::ReportOfPart { command, .. } => format!("join the parts with `coliconv {command} --finish`"),
        K::VerifyPartsAbsent { .. } | K::VerifyPartsMissing { .. } => {
            "run `coliconv verify --part K/N` with the same arguments for each part, then --finish".into()
        }
        K::VerifyPartsMixed { .. } => "remove those that are not wanted, or give another --report".into(),
        K::VerifyPartDiffers { .. } => {
            "give --finish the arguments of the parts; if the model was changed, run the parts again".into()
        }
        K::ReportContradicts { .. } => "it was edited, or is of another version: make the report again".into(),
        K::BaselineNotSource { .. } | K::BaselineOtherSource { .. } => {
            "score the checkpoint that the container was made from, and give its results as --baseline".into()
        }
        K::ReferenceOfItself => {
            "give references of another implementation or of the checkpoint, or verify with --source".into()
        }
        K::ReportSaysNo => "the report itself says what is wrong".into(),
        K::DeviceNotUsed { .. } => "verify where the device works, or leave it out of --device".into(),
        K::PolicyMissed { what, expected, .. } if what == "the devices that computed" => {
            format!("run `coliconv verify CONTAINER --device {expected} …` where there is one, and give its report, too")
        }
        K::PolicyMissed { what, .. } if what.starts_with("the number of devices") => {
            "verify with --device on more devices, and give all reports".into()
        }
        K::PolicyMissed { what, .. } if what.starts_with("the number of references") => {
            "verify with more --reference, or with --source".into()
        }
        K::PolicyMissed { what, .. }
            if ["questions", "tokens", "tasks", "texts"].iter().any(|of| what.starts_with(&format!("the number of {of}"))) =>
        {
            "score more: other inputs, or a larger --limit".into()
        }
        K::PolicyMissed { what, .. } if what.starts_with("the number of predictions") => {
            "verify with more or longer --reference, or with --source".into()
        }
        K::PolicyMissed { what, .. } if what.contains("rows") => {
            "the report says why rows got no score: mend them, or set `score.allow_excluded` in --policy".into()
        }
        K::PolicyMissed { what, .. } if what.contains("log-probability") || what.contains("near-ties") => {
            "more bits change nothing here, for the reference is of this very container: look at how it was made and at the \
             device, or ask for less in --policy"
                .into()
        }
        K::PolicyMissed { what, .. } if what.starts_with("the mode in which") => {
            "do that again without --mode fast: no policy takes what rounded sums show".into()
        }
        K::PolicyMissed { .. } => "make the container anew with more bits, or ask for less in --policy".into(),
        K::CardChanged { .. } => {
            "words of your own go into `card.notes` of the policy; take back the change, or remove README.md if `publish` made \
             it: the source's own card is put back from the source"
                .into()
        }
        K::CardMissing => "copy README.md of the source, as it was converted, into the container".into(),
        K::CardSyntax { .. } => {
            "correct it in the source and convert again, or leave it: only its text is kept then".into()
        }
        K::TwoCards { .. } => {
            "leave only the source's card, as README.md, in the checkpoint, or give the other another name, and convert anew \
             into an empty directory"
                .into()
        }
        K::LicenseUnknown => "add the source's LICENSE or card to the checkpoint before converting".into(),
        K::LicenseLinkDead { .. } => "add the file to the checkpoint before converting".into(),
        K::BaseModelUnknown => "set `card.base_model` in a --policy file to ORG/NAME of the source".into(),
        K::TooLargeForHub { .. } => "convert from a checkpoint in smaller shards".into(),
        K::ListingSyntax { .. } => {
            "give what https://huggingface.co/api/models/ORG/NAME/tree/main?recursive=true answers, or a JSON list of \
             huggingface_hub's RepoFile fields"
                .into()
        }
        K::ListingNames { .. } => {
            "fetch https://huggingface.co/api/models/ORG/NAME/tree/main?recursive=true, which has them; with huggingface_hub \
             they are in `list_repo_tree(…, recursive=True)` and in `model_info(…, files_metadata=True)`"
                .into()
        }
        K::ListingNoHash => "fetch the listing anew, with hashes; a size alone proves nothing".into(),
        K::PassLeftOut { key, .. } => format!("set `{key}` to true, unless it is meant so"),
        K::PassStays { key, .. } => format!("set `{key}` to true, or give another directory as `container`"),
        K::DraftsUnasked => "give `verify.min_mtp_acceptance` a share above 0, unless it is meant so".into(),
        K::NestedDirectory { .. } => "choose a directory beside it".into(),
        K::SumsForeign => {
            "move it out of the directory, or remove it: publishing writes a SHA256SUMS of all files".into()
        }
        K::PagesNotDirectory => "make the directory first, or give one that is there".into(),
        K::NameNotCarried => "rename it in the source if the container is to have it".into(),
        K::ListingSize { .. } | K::ListingHash { .. } => "upload the file again".into(),
        K::ListingMissing => "upload the file; should many be missing, the listing may be its first page alone".into(),
        K::ListingExtra => "delete it from the repository: nobody has verified it".into(),
        K::GpuLibrary { api: "CUDA", .. } => "install NVIDIA's driver; nothing else of CUDA is needed".into(),
        K::GpuLibrary { .. } => "install the Vulkan loader and the GPU's driver".into(),
        K::GpuSymbol { .. } => "install a newer driver".into(),
        K::GpuOrdinal { .. } => "`coliconv devices` lists what there is".into(),
        K::GpuApi { reason, .. } if reason.contains("VK_LAYER_KHRONOS_validation") => {
            "install the validation layers, or unset COLICONV_VULKAN_VALIDATION".into()
        }
        K::GpuApi { .. } => "`vulkaninfo --summary` shows what the loader finds; VK_DRIVER_FILES may hide a driver".into(),
        K::GpuLacks { .. } => "use --device cpu".into(),
        K::GpuTimeout { .. } => "the driver may have given up: restart, and see what the system's log says of the GPU".into(),
        K::ModeNotAvailable { .. } => {
            "leave it out, or use --device cuda with a GPU of compute capability 8.0 or later, or --device vulkan with one that \
             has cooperative matrices: `coliconv devices` says so"
                .into()
        }
        K::GpuTooOld { .. } => "use --device cpu".into(),
        K::GpuMemory { wanted, total, .. } if wanted > total => {
            "the GPU is too small for it: use --device cpu, or, with `bench`, a smaller --size".into()
        }
        K::GpuMemory { .. } => "end what else uses the GPU, or use --device cpu".into(),
        K::GpusMemory { by_limit: true, .. } => {
            "give more with --device-memory, name more GPUs, or use --device cpu, which reads routed experts from the disk".into()
        }
        K::GpusMemory { .. } => {
            "name more GPUs, end what else uses them, or use --device cpu, which reads routed experts from the disk".into()
        }
        K::DeviceUnused { .. } => "`coliconv devices` says what can be done about it".into(),
        K::GpuMemoryLimit { .. } | K::GpuExpertsMemory { .. } => {
            "give more with --device-memory, or use --device cpu".into()
        }
        K::GpuFaultUnnoticed { .. } => "choose another launch: --inject-fault numbers:1 is noticed".into(),
        K::GpuCall { code, launched, .. } => return gpu_hint(code, launched.is_some()),
        _ => return None,
    };
    Some(text)
}

/// What no correct writer of safetensors files writes.
fn is_broken_header(kind: &FaultKind) -> bool {
    use FaultKind as K;
    matches!(
        kind,
        K::HeaderPadding { .. }
            | K::MetadataNotStrings { .. }
            | K::MetadataTwice
            | K::MetadataKeyTwice { .. }
            | K::DuplicateInHeader
            | K::NameLength { .. }
            | K::EntryKeyMissing { .. }
            | K::EntryKeyTwice { .. }
            | K::EntryKeyUnknown { .. }
            | K::EntrySyntax { .. }
            | K::UnknownDtype { .. }
            | K::RankTooLarge { .. }
            | K::SizeOverflow { .. }
            | K::SpanMismatch { .. }
            | K::OffsetsBackwards { .. }
            | K::OffsetsOverflow { .. }
            | K::OffsetsOutside { .. }
            | K::TrailingBytes { .. }
            | K::Gap { .. }
            | K::Overlap { .. }
    )
}

/// A manifest that is damaged or of other files.
fn is_broken_manifest(kind: &FaultKind) -> bool {
    use FaultKind as K;
    matches!(
        kind,
        K::ManifestPath { .. }
            | K::ManifestFileTwice
            | K::ManifestFormat { .. }
            | K::ManifestIncomplete { .. }
            | K::ManifestFileUnknown
            | K::ManifestTensorMissing
            | K::ManifestTensorUnknown
            | K::ManifestTensorDiffers { .. }
    )
}

fn io_hint(source: &std::io::Error) -> Option<String> {
    use std::io::ErrorKind;
    match source.kind() {
        ErrorKind::StorageFull => Some("free some space and run again: finished files are kept".into()),
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            Some("check the permissions of the file and its directory".into())
        }
        _ => None,
    }
}

/// By the code of a call that failed; `later` is whether kernels that were started before may be the reason.
fn gpu_hint(code: &str, later: bool) -> Option<String> {
    let text = match code.split(' ').next().unwrap_or_default() {
        "CUDA_ERROR_NO_DEVICE" => {
            "`nvidia-smi` shows whether the driver sees a GPU; CUDA_VISIBLE_DEVICES may hide it, or the container was \
             started without GPUs"
        }
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" | "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE" => {
            "the driver's library and its kernel module are of different versions: restart the machine, or use the \
             library that came with the module"
        }
        "CUDA_ERROR_SYSTEM_NOT_READY" => "a service of the machine is not running: nvidia-fabricmanager, as a rule",
        "CUDA_ERROR_DEVICE_UNAVAILABLE" => "another process has the GPU for itself",
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" | "CUDA_ERROR_NO_BINARY_FOR_GPU" => "install a newer driver",
        "VK_ERROR_DEVICE_LOST" => {
            "the driver ended what the GPU did: the system's log says why; COLICONV_VULKAN_VALIDATION=1 looks for a mistake of \
             this program"
        }
        "VK_ERROR_INITIALIZATION_FAILED" | "VK_ERROR_INCOMPATIBLE_DRIVER" => "install or repair the GPU's driver",
        "CUDA_ERROR_ECC_UNCORRECTABLE" => "the GPU's memory is faulty: `nvidia-smi -q` tells more",
        name if later && name.starts_with("CUDA_") => {
            "with CUDA_LAUNCH_BLOCKING=1 in the environment the message names the kernel"
        }
        _ => return None,
    };
    Some(text.into())
}
