//! Keys of the maps in the metadata of requests and answers. Each key is written here and nowhere
//! else.

/// Priority points of a request.
pub const POINTS: &str = "points";
/// Name of the LoRA adapter.
pub const ACTIVE_ADAPTER: &str = "active_adapter";
/// Which tensor each argument is.
pub const ARGS_STRUCTURE: &str = "args_structure";
/// KV positions per sequence, in the first message of a session.
pub const MAX_LENGTH: &str = "max_length";
/// The session on the server that is addressed.
pub const SESSION_ID: &str = "session_id";
/// One step of the model, the same on all servers.
pub const STEP_ID: &str = "step_id";
/// Position that a step continues from.
pub const START_FROM_POSITION: &str = "start_from_position";
/// Servers that the output is pushed to.
pub const NEXT_SERVERS: &str = "next_servers";
/// Whether a server pushed the step.
pub const PUSHED: &str = "pushed";
/// Seconds to wait for KV memory.
pub const ALLOC_TIMEOUT: &str = "alloc_timeout";
/// Compressions of the answer's tensors.
pub const OUTPUT_COMPRESSION: &str = "output_compression";
/// Whether a Sepal client asks for the times of a step. Other servers ignore the key.
pub const SEPAL_TIMING: &str = "sepal_timing";
/// Whether all tensors of a pushed step are those of that step, as Sepal servers push it. Petals servers push
/// the beam order of a session's first step.
pub const SEPAL_EXACT: &str = "sepal_exact";

/// In an answer: nanoseconds between submission and the start of the work.
pub const QUEUE_NS: &str = "queue_ns";
/// In an answer: nanoseconds of work.
pub const COMPUTE_NS: &str = "compute_ns";
/// In an answer: nanoseconds between the last byte of the request and the first of the answer.
pub const SERVER_NS: &str = "server_ns";

/// Whether a Sepal client can resume the session that begins. Other servers ignore the key.
pub const SEPAL_RESUMABLE: &str = "sepal_resumable";
/// The secret of the session that a Sepal client resumes.
pub const SEPAL_RESUME: &str = "sepal_resume";
/// In the first answer of a session that can be resumed: its secret.
pub const SEPAL_SECRET: &str = "sepal_secret";
/// In the same answer: milliseconds for which the session is kept.
pub const SEPAL_GRACE_MS: &str = "sepal_grace_ms";
