//! The command line from outside: what `sepal doctor`, `plan`, `convert`, `cache`, `top`, `demo` and the flags of `serve` do
//! and print, and the commands of the documents.

mod closed_terminals;
mod demo;
mod doctor;
mod files;
mod flags;
mod format;
#[path = "../harness/mod.rs"]
mod harness;
mod hub_client;
mod plan;
mod readme;
mod top;
