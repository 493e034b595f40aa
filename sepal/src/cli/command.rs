//! What the command line asks for.

use std::path::PathBuf;

use shared::config::{
    CacheConfig, ChatConfig, ConvertConfig, DemoConfig, Device, DhtNodeConfig, FetchConfig,
    GatewayConfig, GenerateConfig, LogConfig, ProbeConfig, ServeConfig,
};
use shared::control::Role;
use shared::warpgroups::WarpgroupKernels;
use supervisor::handover::HandoverOptions;

use super::{DoctorOptions, Generated, PlanOptions};
use crate::status::{OrderOptions, StatusOptions};

/// What `sepal` was asked to do.
#[derive(Debug)]
pub enum Command {
    /// Serve blocks of a model.
    Serve {
        config: Box<ServeConfig>,
        /// Flags without effect, a sentence each, to be logged once logging has started.
        notes: Vec<String>,
    },
    /// Print the settings of `serve`, which are in this text.
    ShowConfig(String),
    /// Say what `serve` would do with these settings.
    Plan(Box<PlanOptions>),
    /// Work on the cache folder.
    Cache(CacheConfig),
    /// Convert a model ahead of time.
    Convert(ConvertConfig, LogConfig),
    /// Run a bootstrap node.
    Dht {
        config: DhtNodeConfig,
        log: LogConfig,
        /// Flags without effect, a sentence each.
        notes: Vec<String>,
    },
    /// Generate text through the swarm.
    Generate(GenerateConfig, FetchConfig, LogConfig),
    /// Answer OpenAI's API over models of a swarm.
    Gateway(Box<GatewayConfig>, FetchConfig, LogConfig),
    /// Talk to a model of a swarm.
    Chat(Box<ChatConfig>, FetchConfig, LogConfig),
    /// Start a private swarm and generate text through it.
    Demo(DemoConfig, LogConfig),
    /// Show what runs.
    Status(StatusOptions),
    /// Give an order to a running instance.
    Order(OrderOptions),
    /// Write manual pages, or print completions for a shell.
    Generated(Generated),
    /// The same, live on a terminal.
    Top(StatusOptions),
    /// Check the machine, the network and the settings.
    Doctor(Box<DoctorOptions>),
    /// Check and measure a device.
    SelfTest {
        device: Device,
        /// Only the smallest cases.
        is_quick: bool,
        /// The file that everything that is found goes to.
        report: Option<PathBuf>,
        /// The process that waits for the outcome and with which the test ends.
        parent: Option<u32>,
        /// Kernels for warpgroups that it must not launch.
        skipped: WarpgroupKernels,
    },
    /// List the CUDA devices, for the process that started this one.
    CudaDevices {
        /// That process.
        parent: u32,
    },
    /// Take the sample of warpgroups, for the process that started this one.
    Sample {
        /// Number of the CUDA device.
        ordinal: u32,
        kernels: WarpgroupKernels,
        /// That process.
        parent: u32,
    },
    /// Take a step through a server, for the process that started this one.
    Probe(ProbeConfig),
    /// Take over from another executable of a supervisor.
    Handover(HandoverOptions),
    /// Be a child of a supervisor.
    Role { role: Role, bootstrap: i32 },
}
