//! `coliconv completions` and `coliconv man`: what packages install beside the program.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::Shell;

use super::print;
use crate::error::{Fault, FaultKind, Faults, Place};
use crate::io::write_whole;

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell that is to complete
    shell: Shell,
}

/// Arguments of `man`.
#[derive(Debug, Args)]
pub(crate) struct Manual {
    /// Directory for the pages, one a command; pages that are there are replaced
    directory: PathBuf,
}

/// Runs `completions`.
pub(crate) fn completions(arguments: &Completions, mut command: Command) -> ExitCode {
    let name = command.get_name().to_owned();
    let mut text = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, name, &mut text);
    print(&String::from_utf8_lossy(&text))
}

/// Runs `man`.
pub(crate) fn manual(arguments: &Manual, command: Command) -> Result<ExitCode, Faults> {
    let directory = &arguments.directory;
    if !directory.is_dir() {
        return Err(Fault::new(Place::file(directory), FaultKind::PagesNotDirectory).into());
    }
    let name = command.get_name().to_owned();
    let mut command = command.disable_help_subcommand(true);
    command.build();
    // What is planned has nothing to be told about.
    let planned = |page: &Command| page.get_about().is_some_and(|about| about.to_string() == super::PLANNED);
    let planned: Vec<String> =
        command.get_subcommands().filter(|page| planned(page)).map(|page| page.get_name().into()).collect();
    for name in planned {
        command = command.mut_subcommand(name, |page| page.hide(true));
    }
    let own: Vec<Command> = command.get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect();
    let pages = own.into_iter().map(|page| {
        let title = format!("{name}-{}", page.get_name());
        page.name(title.clone()).bin_name(title)
    });
    let mut written = 0;
    for page in [command.clone()].into_iter().chain(pages) {
        let path = directory.join(format!("{}.1", page.get_name()));
        let mut text = Vec::new();
        clap_mangen::Man::new(page).render(&mut text).map_err(|e| Fault::io("write the page", &path, e))?;
        write_whole(&path, &text, true)?;
        written += 1;
    }
    Ok(print(&format!("{written} pages\n")))
}
