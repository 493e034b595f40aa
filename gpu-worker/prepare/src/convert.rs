//! `sepal convert`: the blocks of a model in a format that workers map as it is, as a folder that can
//! go to other machines. Blocks are finished one by one beside the folder's place, so that an
//! interrupted run is taken up where it stopped, and the folder appears when it is whole.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use shared::block::{BlockIndex, Span};
use shared::config::{HubConfig, PrepareConfig, QuantChoice, QuantType};
use shared::control::{self, PrepareStage};
use shared::dtype::{DType, dtype_or_auto};
use shared::exit::ExitReason;
use shared::files::write_atomically;
use shared::sanitize_text::{Escaped, escaped};

use crate::error::PrepareError;
use crate::folder::{BlockFile, FolderRecord, RECORD, StoredFormat};
use crate::inspect::Inspected;
use crate::progress::{PrepareProgress, Tracker};
use crate::source::stored_bytes;
use crate::staging::{Staging, check_space};
use crate::store::{FORMAT_VERSION, StorePlace};
use crate::table::decimal;

/// Settings of `sepal convert`.
#[derive(Clone, Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ConvertConfig {
    /// Model folder in Hugging Face layout, or a repository of the Hub such as bigscience/bloom
    pub model: String,
    /// How matrices are stored: int8 or nf4
    #[arg(long, value_name = "TYPE", value_parser = quantized)]
    pub quant_type: QuantType,
    /// Folder to make; it must not exist yet, or be empty
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Convert only these blocks [default: all]
    #[arg(long, value_name = "START:END")]
    pub blocks: Option<Span>,
    /// Type of hidden states and unquantized weights: auto, float32, bfloat16 or float16; auto is
    /// the type of the checkpoint, bfloat16 if that is float32
    // The path has clap take `auto` for a value.
    #[arg(id = "torch_dtype", long = "torch_dtype", value_name = "TYPE", default_value = "auto", value_parser = dtype_or_auto)]
    pub dtype: std::option::Option<DType>,
    /// Folder for downloads [env: SEPAL_CACHE, PETALS_CACHE] [default: ~/.cache/sepal]
    #[arg(long, value_name = "DIR", required = false)]
    pub cache_dir: PathBuf,
    #[command(flatten)]
    pub hub: HubConfig,
}

impl ConvertConfig {
    /// What is to be made ready.
    fn prepare(&self) -> PrepareConfig {
        PrepareConfig {
            model: self.model.clone(),
            dtype: self.dtype,
            quant_type: QuantChoice::Named(self.quant_type),
            adapters: Vec::new(),
            cache_dir: self.cache_dir.clone(),
            hub: self.hub.clone(),
        }
    }
}

fn quantized(text: &str) -> Result<QuantType, String> {
    let named = text.parse().ok().filter(|quant_type| *quant_type != QuantType::None);
    named.ok_or_else(|| "expected int8 or nf4".to_owned())
}

/// Converts as `config` says, with progress on a terminal; errors go to standard error.
pub fn run_command(config: &ConvertConfig) -> ExitReason {
    let mut line = ProgressLine::new();
    let converted = convert(config, |progress| {
        line.show(progress);
        Ok(())
    });
    line.clear();
    match converted {
        Ok(text) => {
            println!("{text}");
            ExitReason::Clean
        }
        Err(error) => {
            eprintln!("sepal: {}", Escaped(&error));
            error.exit_reason()
        }
    }
}

/// Converts and returns what to tell the operator. An error of `progress` stops the work, which the
/// next run goes on with.
fn convert(
    config: &ConvertConfig,
    mut progress: impl FnMut(PrepareProgress) -> Result<(), PrepareError>,
) -> Result<String, PrepareError> {
    let mut inspected = Inspected::new(&config.prepare())?;
    if inspected.converted().is_some() {
        let reason = "is converted already; give the original model";
        return Err(PrepareError::bad_file(&inspected.folder, reason));
    }
    let num_blocks = inspected.facts.num_blocks;
    let span = match config.blocks {
        Some(span) if span.end().0 > num_blocks => {
            return Err(PrepareError::BadSpan { span, num_blocks });
        }
        Some(span) => span,
        None => Span::new(0, num_blocks)
            .map_err(|error| PrepareError::bad_file(&inspected.folder, error.to_string()))?,
    };
    let mut record = record(&inspected);
    if let Some(done) = finished(&config.out, &record, span)? {
        check_source(&mut inspected, span, &config.out, &mut progress)?;
        return Ok(said(&config.out, &done, "already holds"));
    }
    let staging = Staging::resume(&config.out)?;
    check_room(&inspected, span, staging.folder())?;
    for (number, block) in (1..).zip(span.blocks()) {
        progress(PrepareProgress::Block { block: number, blocks: span.block_count() as u32 })?;
        let file = convert_block(&mut inspected, block, staging.folder(), &mut progress)?;
        record.blocks.insert(block.0, file);
    }
    let path = staging.folder().join("config.json");
    let json = inspected.config.to_string();
    write_atomically(&path, |file| file.write_all(json.as_bytes()))
        .map_err(|e| PrepareError::write(&path, e))?;
    remove_others(staging.folder(), &record);
    record.write(&staging.folder().join(RECORD))?;
    staging.finish()?;
    Ok(said(&config.out, &record, "holds"))
}

/// What the folder will hold, without its blocks.
fn record(inspected: &Inspected) -> FolderRecord {
    let facts = &inspected.facts;
    let format = StoredFormat {
        layout: FORMAT_VERSION,
        quant_type: facts.quant_type.name().to_owned(),
        dtype: facts.dtype.name().to_owned(),
    };
    let mut record = FolderRecord::new(facts.name.clone(), facts.num_blocks, Some(format));
    match (&inspected.hub, &inspected.record) {
        (Some(hub), _) => {
            record.repository = Some(hub.name().to_owned());
            record.commit = Some(hub.commit().to_owned());
        }
        (None, Some(of_folder)) => {
            record.repository.clone_from(&of_folder.repository);
            record.commit.clone_from(&of_folder.commit);
        }
        (None, None) => {}
    }
    record
}

/// The record of a folder that an earlier run finished with the same model, format and blocks.
fn finished(
    out: &Path,
    wanted: &FolderRecord,
    span: Span,
) -> Result<Option<FolderRecord>, PrepareError> {
    let Some(found) = FolderRecord::read(out)? else {
        return Ok(None);
    };
    let mut empty = found.clone();
    empty.blocks.clear();
    let is_same = empty == *wanted && found.check_span(out, span).is_ok();
    Ok(is_same.then_some(found))
}

/// Checks that the finished blocks in `out` were made from the files of the model as they are now. A
/// commit of the Hub says that already.
fn check_source(
    inspected: &mut Inspected,
    span: Span,
    out: &Path,
    progress: &mut impl FnMut(PrepareProgress) -> Result<(), PrepareError>,
) -> Result<(), PrepareError> {
    if inspected.hub.is_some() {
        return Ok(());
    }
    for block in span.blocks() {
        let wanted = inspected.fetch(block, progress)?;
        let sources = inspected.sources(&wanted)?;
        let path = out.join(file_name(block));
        let place = StorePlace::whole(path, block, inspected.facts.dtype, &sources);
        if place.reuse().is_none() {
            let reason = format!(
                "holds other weights for block {block} than {}, whose files were changed or moved; delete the folder, or give \
                 another --out",
                inspected.folder.display()
            );
            return Err(PrepareError::bad_file(out, reason));
        }
    }
    Ok(())
}

fn said(out: &Path, record: &FolderRecord, verb: &str) -> String {
    let bytes = record.blocks.values().map(|block| block.bytes).sum();
    let quant = record.format.as_ref().map_or("", |format| &format.quant_type);
    let (ranges, count, command) = (record.ranges(), record.num_blocks, record.serve_command(out));
    format!(
        "{} {verb} blocks {ranges} of {count} of {} in {quant} ({}); serve them with: {command}",
        out.display(),
        escaped(&record.model),
        decimal(bytes)
    )
}

/// Refuses blocks that do not fit on the disk beside those that are there.
fn check_room(inspected: &Inspected, span: Span, folder: &Path) -> Result<(), PrepareError> {
    let facts = &inspected.facts;
    let bytes = |block: BlockIndex| {
        if folder.join(file_name(block)).is_file() {
            return 0;
        }
        let tensors = inspected.spec.tensors(block.0 as usize).into_iter();
        let bytes = tensors.map(|tensor| {
            let shape: Vec<u64> = tensor.shape.iter().map(|&side| side as u64).collect();
            let quant = inspected.spec.quant_of(&tensor.name, shape.len(), facts.quant_type);
            stored_bytes(quant, facts.dtype, &shape).unwrap_or(u64::MAX)
        });
        bytes.fold(0, u64::saturating_add)
    };
    check_space(folder, span.blocks().map(bytes).fold(0, u64::saturating_add))
}

/// The finished file of a block; one of an earlier run is used again if its source is unchanged.
fn convert_block(
    inspected: &mut Inspected,
    block: BlockIndex,
    folder: &Path,
    progress: &mut impl FnMut(PrepareProgress) -> Result<(), PrepareError>,
) -> Result<BlockFile, PrepareError> {
    let wanted = inspected.fetch(block, progress)?;
    let sources = inspected.sources(&wanted)?;
    let (dtype, file) = (inspected.facts.dtype, file_name(block));
    let place = StorePlace::whole(folder.join(&file), block, dtype, &sources);
    let prepared = match place.reuse() {
        Some(prepared) => prepared,
        None => place.make(dtype, &sources, |bytes| progress(PrepareProgress::Tensor { bytes }))?,
    };
    Ok(BlockFile { file, bytes: prepared.entry.len })
}

fn file_name(block: BlockIndex) -> String {
    format!("block-{block}.safetensors")
}

/// Removes what earlier runs left: other blocks, and files that they did not finish. This process
/// alone writes to the folder.
fn remove_others(folder: &Path, record: &FolderRecord) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_wanted = record.blocks.values().any(|block| block.file == name);
        if !is_wanted && is_of_convert(&name) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Whether it is the name of a block that was converted, or of an unfinished file of ours
/// ([`write_atomically`]).
fn is_of_convert(name: &str) -> bool {
    let is_block = |name: &str| {
        let number = name.strip_prefix("block-").and_then(|rest| rest.strip_suffix(".safetensors"));
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    let unfinished = || {
        let (name, process) = name.strip_prefix('.')?.strip_suffix(".tmp")?.rsplit_once('.')?;
        process.parse::<u32>().is_ok().then_some(name)
    };
    is_block(name)
        || unfinished()
            .is_some_and(|name| is_block(name) || [RECORD, "config.json"].contains(&name))
}

/// The line of progress on a terminal.
struct ProgressLine {
    tracker: Tracker,
    is_shown: bool,
}

impl ProgressLine {
    fn new() -> ProgressLine {
        ProgressLine { tracker: Tracker::default(), is_shown: std::io::stderr().is_terminal() }
    }

    fn show(&mut self, progress: PrepareProgress) {
        let told = self.tracker.record(progress, std::time::Instant::now());
        if let Some(told) = told.filter(|_| self.is_shown) {
            eprint!("\r\x1b[K{}", line_text(&told));
        }
    }

    fn clear(&self) {
        if self.is_shown {
            eprint!("\r\x1b[K");
        }
    }
}

fn line_text(told: &control::Progress) -> String {
    let what = match told.stage {
        PrepareStage::Downloading => "downloading",
        PrepareStage::Converting => "converting",
    };
    let done = decimal(told.bytes_done);
    let of = match told.bytes_total {
        0 => String::new(),
        total => format!(" of about {}", decimal(total)),
    };
    format!("{what} block {} of {}: {done}{of}", told.block, told.blocks)
}

#[cfg(test)]
mod tests;
