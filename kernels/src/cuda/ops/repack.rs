//! Launches `repack.cu`: uploads NF4 matrices of whole groups in tiles.

use crate::cuda::gpu::ctas;
use crate::cuda::{Address, Cuda, Gpu, Launch, Params, PooledMemory};
use crate::ops::OpError;
use crate::quant::nf4::{self, GROUP};
use crate::sizes::repack::{CHUNK, CHUNK_BYTES, STRIP, TILE_BYTES, WARPS};

/// Copies a matrix `[outputs, inputs]` to the device in the layout of `nf4_tiles` (`nf4.cuh`). Its
/// stored bytes pass through a scratch of `most_bytes`, or of one strip of outputs, so that the
/// device never has the matrix twice.
///
/// # Errors
/// When the device has no memory for it, or fails.
pub(crate) fn upload<G: Gpu>(
    cuda: &mut Cuda<G>,
    parts: &nf4::Nf4Parts<'_>,
    [outputs, inputs]: [usize; 2],
    most_bytes: usize,
) -> Result<PooledMemory<G>, OpError> {
    let shape = OpError::Shape { op: "repack", what: "a matrix of whole groups" };
    let sections = nf4::tiled_sections(outputs, inputs, parts.layout()).ok_or(shape.clone())?;
    let [codes_bytes, absmax_bytes, _] = sections;
    let memory = cuda.reserve(nf4::tiled_bytes(outputs, inputs, parts.layout()).ok_or(shape)?)?;
    let blocks = inputs / GROUP;
    let codes = Section {
        kernel: "repack_nf4_codes",
        row_bytes: inputs / 2,
        strip_bytes: blocks * TILE_BYTES,
        warps: blocks,
        blocks,
    };
    let absmax = Section {
        kernel: "repack_nf4_scales",
        row_bytes: blocks,
        strip_bytes: blocks.div_ceil(CHUNK) * CHUNK_BYTES,
        warps: blocks.div_ceil(CHUNK),
        blocks,
    };
    codes.upload(cuda, parts.codes, memory.address(), most_bytes)?;
    let at = memory.address().offset(codes_bytes);
    absmax.upload(cuda, parts.absmax, at, most_bytes)?;
    let at = at.offset(absmax_bytes);
    let seconds: Vec<u8> =
        parts.absmax2.iter().copied().chain(parts.offset.to_le_bytes()).collect();
    // SAFETY: `tiled_sections` counts the second scales of all groups and the offset.
    let done = unsafe { cuda.gpu.write(&seconds, at) };
    cuda.noted(done)?;
    // Products read weights before they wait for earlier launches.
    cuda.end_before_next();
    Ok(memory)
}

/// The codes of a matrix, or those of its scales.
struct Section {
    kernel: &'static str,
    /// Stored bytes of an output.
    row_bytes: usize,
    /// Tiled bytes of a strip of outputs.
    strip_bytes: usize,
    /// Warps of a strip.
    warps: usize,
    /// Blocks of an output.
    blocks: usize,
}

impl Section {
    /// Uploads the stored bytes `from` as tiles at `to`.
    fn upload<G: Gpu>(
        &self,
        cuda: &mut Cuda<G>,
        from: &[u8],
        to: Address,
        most_bytes: usize,
    ) -> Result<(), OpError> {
        let strip = STRIP * self.row_bytes;
        let piece = (most_bytes / strip).max(1) * strip;
        let scratch = cuda.scratch(piece.min(from.len()))?;
        let mut to = to;
        for stored in from.chunks(piece) {
            // SAFETY: the scratch has the bytes of a piece; the launch before has read the last one
            // when this copy, enqueued behind it, begins.
            let done = unsafe { cuda.gpu.write(stored, scratch.address()) };
            cuda.noted(done)?;
            let rows = stored.len() / self.row_bytes;
            let strips = rows.div_ceil(STRIP);
            let launch = Launch {
                kernel: self.kernel,
                grid: [ctas((strips * self.warps).div_ceil(WARPS)), 1, 1],
                cta: [ctas(WARPS * 32), 1, 1],
                shared_bytes: 0,
                params: Params::new()
                    .address(scratch.address())
                    .address(to)
                    .count(rows)
                    .count(self.blocks),
            };
            // SAFETY: the scratch has `rows` rows, and the section at `to` the strips of all pieces.
            unsafe { cuda.launch(launch)? };
            to = to.offset(strips * self.strip_bytes);
        }
        Ok(())
    }
}
