//! What the command line asks for.

use client::demo::DemoConfig;
use client::generate::GenerateConfig;
use client::probe::ProbeConfig;
use gateway::chat::ChatConfig;
use gateway::config::GatewayConfig;
use gpu_worker::sample::SampleConfig;
use gpu_worker::selftest::SelfTestConfig;
use netd::dht_node::DhtNodeConfig;
use prepare::cache::CacheConfig;
use prepare::client_tensors::FetchConfig;
use prepare::convert::ConvertConfig;
use shared::config::{LogConfig, ServeConfig};
use shared::control::Role;
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
    Convert(Box<ConvertConfig>, LogConfig),
    /// Run a bootstrap node.
    Dht {
        config: DhtNodeConfig,
        log: LogConfig,
        /// Flags without effect, a sentence each.
        notes: Vec<String>,
    },
    /// Generate text through the swarm.
    Generate(Box<GenerateConfig>, FetchConfig, LogConfig),
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
    SelfTest(SelfTestConfig),
    /// List the CUDA devices, for the process that started this one.
    CudaDevices {
        /// That process.
        parent: u32,
    },
    /// Take the sample of warpgroups, for the process that started this one.
    Sample(SampleConfig),
    /// Take a step through a server, for the process that started this one.
    Probe(ProbeConfig),
    /// Take over from another executable of a supervisor.
    Handover(HandoverOptions),
    /// Be a child of a supervisor.
    Role { role: Role, bootstrap: i32 },
}
