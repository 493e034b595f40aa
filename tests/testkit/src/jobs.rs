//! Jobs of which a test names a field or two.

use shared::block::BlockIndex;
use shared::dtype::DType;
use shared::job::{JobBody, SlotRef, StepPages, WorkKind};

/// A job over the first `blocks` blocks on states of four f32, without slots and pages.
pub fn job_body(kind: WorkKind, batch: u32, tokens: u32, blocks: u32) -> JobBody {
    let slot = SlotRef { offset: 0, len: 0 };
    JobBody {
        kind,
        dtype: DType::F32,
        blocks: (0..blocks).map(BlockIndex).collect(),
        adapter: None,
        batch,
        tokens,
        hidden: 4,
        pages: StepPages::default(),
        input: slot,
        output: slot,
        prompts: None,
        output_gradient: None,
        prompt_gradient: None,
    }
}
