//! Which tests are run again for another isolation than the daemon's default, to see that nothing but the engine differs.

use std::process::{Command, ExitCode};

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use libtest_mimic::{Completion, Trial};

use super::cli::{binary, run};
use super::{Skip, Test, trial};

/// How all agents are isolated, where `DORM_E2E_ISOLATION` says so.
pub(crate) fn isolation() -> Option<String> {
    std::env::var("DORM_E2E_ISOLATION").ok()
}

/// Whether agents are behind gVisor unless they are told otherwise.
pub(crate) fn behind_gvisor() -> bool {
    isolation().as_deref() == Some("gvisor")
}

/// Whether the agents of this run are virtual machines.
pub(crate) fn in_machines() -> bool {
    isolation().as_deref() == Some("vm")
}

/// The tests of this run. `DORM_E2E_ISOLATION` alone means the core; with `DORM_E2E_ALL`, all that an engine has a part in.
pub(crate) fn of_this_run(features: Vec<(&'static str, Vec<Test>)>) -> Result<Vec<Trial>> {
    let all = features
        .into_iter()
        .flat_map(|(feature, tests)| tests.into_iter().map(move |test| (feature, test)));
    let all: Vec<(&'static str, Test)> = all.collect();
    for name in required() {
        let known = ["container", "gvisor", "vm"].contains(&name.as_str());
        ensure!(known, "DORM_E2E_REQUIRE: `{name}` is no isolation");
    }
    let Some(isolation) = isolation() else {
        return Ok(all
            .into_iter()
            .map(|(feature, test)| trial(feature, test))
            .collect());
    };
    let (core, cannot) = match isolation.as_str() {
        "gvisor" => (CORE, GVISOR_CANNOT),
        "vm" => (MACHINES_CORE, VM_CANNOT),
        other => bail!("DORM_E2E_ISOLATION: `{other}` is neither gvisor nor vm"),
    };
    for name in core.iter().chain(cannot.iter().flat_map(|(_, tests)| *tests)) {
        let known = all.iter().any(|(_, test)| test.name == *name);
        ensure!(known, "tests/e2e/harness/engines.rs: there is no test `{name}`");
    }
    for (name, _) in WITHOUT_ENGINE {
        let known = all.iter().any(|(feature, _)| feature == name);
        ensure!(
            known,
            "tests/e2e/harness/engines.rs: there is no feature `{name}`"
        );
    }
    let whole = std::env::var_os("DORM_E2E_ALL").is_some();
    let concerns = |feature: &str, test: &str| match whole {
        true => WITHOUT_ENGINE.iter().all(|(without, _)| *without != feature),
        false => core.contains(&test),
    };
    let of_this_run = all
        .into_iter()
        .filter(|(feature, test)| concerns(feature, test.name))
        .map(|(feature, test)| match reason(cannot, test.name) {
            None => trial(feature, test),
            Some(why) => left_out(feature, test.name, why),
        });
    Ok(of_this_run.collect())
}

/// Tests that an engine cannot pass, each list with the reason.
type Cannot = &'static [(&'static str, &'static [&'static str])];

fn reason(cannot: Cannot, test: &str) -> Option<&'static str> {
    let found = cannot.iter().find(|(_, tests)| tests.contains(&test));
    found.map(|(why, _)| *why)
}

/// A test that is shown with the reason for which it is not run.
fn left_out(feature: &'static str, test: &'static str, why: &'static str) -> Trial {
    Trial::ignorable_test(test.replace('_', " "), move || Ok(Completion::ignored_with(why)))
        .with_kind(feature)
}

/// What a run leaves with at once, where nothing can be run with the isolation that was asked for.
pub(crate) fn nothing_to_run() -> Option<ExitCode> {
    let isolation = isolation()?;
    let error = match missing_for(&isolation) {
        Ok(reason) => skipped(&isolation, reason?),
        Err(error) => error,
    };
    match error.downcast_ref::<Skip>() {
        Some(reason) => {
            eprintln!("skipped, nothing can be isolated like that here: {reason}");
            Some(ExitCode::SUCCESS)
        }
        None => {
            eprintln!("error: {error:#}");
            Some(ExitCode::FAILURE)
        }
    }
}

/// Isolations that must work here, as `DORM_E2E_REQUIRE` says: with commas in between.
fn required() -> Vec<String> {
    let named = std::env::var("DORM_E2E_REQUIRE").unwrap_or_default();
    let names = named.split(',').map(str::trim).filter(|name| !name.is_empty());
    names.map(str::to_owned).collect()
}

/// Why what needs this isolation is not done here; a failure if that must work.
pub(crate) fn skipped(isolation: &str, reason: String) -> Error {
    match required().iter().any(|name| name == isolation) {
        true => anyhow!("DORM_E2E_REQUIRE asks for {isolation}: {reason}"),
        false => Skip(reason).into(),
    }
}

/// Why boxes cannot be isolated like that here, as `dorm doctor` says it.
pub(crate) fn missing_for(isolation: &str) -> Result<Option<String>> {
    let mut doctor = Command::new(binary());
    doctor.arg("doctor");
    let said = run(doctor, b"")?.stdout();
    let line = said
        .lines()
        .find(|line| line.split_whitespace().nth(1) == Some(isolation))
        .with_context(|| format!("dorm doctor does not speak of {isolation}: {said}"))?;
    Ok((!line.starts_with("ok ")).then(|| line.to_owned()))
}

const CORE: &[&str] = &[
    "an_agent_is_made_listed_shown_stopped_started_and_deleted",
    "a_stopped_agent_keeps_its_files_and_programs",
    "the_host_name_is_the_agents_name",
    "a_stop_asks_first_and_waits_for_what_was_asked",
    "a_stop_ends_what_does_not_listen",
    "a_box_that_dies_leaves_its_agent_with_the_reason",
    "stdout_and_stderr_stay_apart",
    "five_megabytes_go_in_by_stdin",
    "twenty_megabytes_come_out_whole",
    "user_folder_and_environment_can_be_chosen",
    "a_timeout_ends_the_command_and_all_its_children",
    "a_shell_opens_and_ends_with_its_exit_code",
    "a_folder_goes_in_and_comes_out_with_modes_and_links",
    "files_belong_to_whom_the_copy_is_made_as",
    "a_file_that_the_user_may_not_read_is_refused",
    "a_paused_agent_uses_no_processor_and_wakes_at_the_next_command",
    "a_process_that_holds_a_value_only_in_memory_survives_on_disk",
    "every_cycle_keeps_files_and_memory_of_the_one_before",
    "a_hibernated_agent_survives_the_daemon_and_a_reboot_with_its_memory",
    "a_fork_goes_on_with_the_memory_under_a_name_of_its_own",
    "a_rollback_brings_back_files_and_memory_and_can_be_undone",
    "boxes_outlive_a_killed_daemon_and_are_adopted",
    "a_box_that_ends_while_no_daemon_runs_is_noticed",
    "strays_on_the_host_are_swept_at_the_start",
    "a_paused_agent_outlives_a_killed_daemon_as_it_was",
    "a_box_reaches_the_outside_with_the_hosts_address",
    "a_box_does_not_reach_the_host",
    "without_the_internet_only_what_is_allowed_is_reached",
    "a_server_on_the_boxs_loopback_is_a_url",
    "ports_are_listed_with_what_listens",
    "large_bodies_go_through_both_ways",
    "a_volume_outlives_its_agent",
    "root_of_a_box_is_nobody_on_the_host",
    "a_home_full_of_traps_starts_all_the_same",
    "files_in_memory_count_as_memory",
    "a_daemon_that_dies_while_an_agent_goes_to_sleep_or_wakes_loses_nothing_of_it",
    "a_daemon_that_dies_in_a_snapshot_or_a_fork_loses_nothing_and_leaves_nothing",
];

/// What is left of it where every box takes seconds to start. What machines have of their own is in the features `vm` and `vm_volumes`.
const MACHINES_CORE: &[&str] = &[
    "twenty_megabytes_come_out_whole",
    "a_timeout_ends_the_command_and_all_its_children",
    "a_hibernated_agent_survives_the_daemon_and_a_reboot_with_its_memory",
    "boxes_outlive_a_killed_daemon_and_are_adopted",
    "a_run_that_ends_while_no_daemon_runs_is_told_to_the_client_that_waits",
    "strays_on_the_host_are_swept_at_the_start",
    "a_box_does_not_reach_the_host",
    "without_the_internet_only_what_is_allowed_is_reached",
    "a_server_on_the_boxs_loopback_is_a_url",
    "a_daemon_that_dies_in_a_rollback_leaves_one_of_the_two_whole",
    "files_in_memory_count_as_memory",
];

/// Features in which no engine has a part, and why.
const WITHOUT_ENGINE: &[(&str, &str)] = &[
    ("acme", "certificates of the daemon"),
    ("bench", "it measures containers, beside what they are made of"),
    ("docs", "documents and the command line's own words"),
    ("gvisor", "its tests choose the isolation themselves"),
    ("runner", "the tests' own order"),
    ("tls", "certificates of the daemon"),
    ("vm", "its tests choose the isolation themselves"),
    ("vm_volumes", "its tests choose the isolation themselves"),
];

/// What gVisor cannot do, or what a test finds out by means of the kernel's own; see docs/engines.md.
const GVISOR_CANNOT: Cannot = &[
    (
        "no program gets rights by a setuid bit",
        &["sudo_works_without_a_password"],
    ),
    (
        "it saves message queues, and no files that have lost their names",
        &[
            "what_cannot_be_saved_is_named_and_goes_on",
            "a_shell_keeps_its_variables_listeners_and_pipes_their_ends",
            "deleted_files_that_are_open_go_on",
            "open_files_without_names_take_no_room_of_a_pool_in_a_file",
        ],
    ),
    (
        "a datagram socket that is connected comes back under the same address only",
        &["a_fork_goes_on_with_a_connection_of_its_sources_address"],
    ),
    (
        "files have no attributes of one's own",
        &["the_python_sdk_reads_writes_watches_and_signs_files"],
    ),
    (
        "ports are reached through the guest, whose connections end at a snapshot",
        &[
            "connections_to_ports_outlive_live_snapshots_and_forks",
            "code_goes_on_over_snapshots_forks_and_sleeps",
        ],
    ),
    (
        "a group with a stopped process is hung up on when a process of it ends",
        &["sessions_groups_and_stopped_processes_come_back"],
    ),
    (
        "CRIU has no part in it",
        &[
            "a_restore_that_does_not_come_to_an_end_is_given_up_and_the_memory_is_not",
            "a_criu_that_is_killed_at_its_work_costs_no_memory",
            "a_criu_that_is_killed_leaves_nothing_in_the_way_of_the_next",
            "where_no_criu_is_found_memory_stays_where_it_is_and_all_else_goes_on",
        ],
    ),
    (
        "the whole box ends for want of memory, or of threads on the host",
        &[
            "limits_hold_in_an_adopted_box",
            "the_process_limit_holds_again_after_a_start",
            "a_box_at_its_process_limit_comes_back_with_its_memory",
        ],
    ),
    (
        "it counts terminals by its own rules, and memory of the guest together with its own",
        &["terminals_of_a_box_have_an_end", "the_guest_stays_small"],
    ),
    (
        "mounts, namespaces, settings, keys and the log of its own kernel are the box's to use; btrfs it does not know",
        &[
            "nothing_can_be_mounted_at_all",
            "the_hosts_settings_cannot_be_written",
            "raw_devices_and_the_kernels_log_are_out_of_reach",
            "no_namespace_can_be_made_or_entered",
            "dangerous_system_calls_are_refused",
            "a_subvolume_cannot_be_made_in_a_home",
            "capabilities_are_bounded",
        ],
    ),
    (
        "the process that is looked at is gVisor's own",
        &["no_descriptor_of_the_host_is_open_in_a_box"],
    ),
    (
        "no frames of one's own making are sent",
        &["questions_for_hardware_addresses_leave_no_trace"],
    ),
    (
        "its interfaces have link-local addresses, which lead nowhere",
        &["a_box_has_no_ipv6_way_out"],
    ),
    (
        "where another process is or waits, and the most memory that it had, is not told",
        &[
            "a_process_that_is_starting_another_comes_back",
            "code_that_prints_more_than_is_read_waits",
        ],
    ),
];

/// What is different in a machine; see docs/engines.md.
const VM_CANNOT: Cannot = &[
    (
        "its kernel is its own: what root does to it, or makes of it, concerns nobody else",
        &[
            "no_device_of_the_host_can_be_mounted_or_made",
            "nothing_can_be_mounted_at_all",
            "no_module_can_be_loaded",
            "the_hosts_settings_cannot_be_written",
            "raw_devices_and_the_kernels_log_are_out_of_reach",
            "masked_paths_are_empty",
            "no_namespace_can_be_made_or_entered",
            "dangerous_system_calls_are_refused",
            "a_32_bit_call_does_not_get_around_the_filter",
            "capabilities_are_bounded",
            "boxes_that_came_back_from_disk_watch_as_much_as_others",
            "the_cgroup_of_a_box_cannot_be_changed_from_inside",
            "the_guest_binary_cannot_be_replaced_from_inside",
            "terminals_of_a_box_have_an_end",
        ],
    ),
    (
        "its file system is on a disk of its own, which is ext4, and as full after a rollback as it was",
        &[
            "a_subvolume_cannot_be_made_in_a_home",
            "a_rollback_does_not_begin_the_quota_anew",
        ],
    ),
    (
        "its processes are not the host's, and are not limited in number",
        &[
            "the_process_limit_holds_again_after_a_start",
            "a_box_at_its_process_limit_comes_back_with_its_memory",
        ],
    ),
    (
        "its memory is a file of its home, which counts as its files, and a machine that needs more of it on a full disk ends; the feature `vm` has a test of its own",
        &[
            "a_snapshot_tells_what_it_holds_beyond_the_one_before",
            "a_full_disk_leaves_agents_as_they_are_until_there_is_room",
            "nothing_is_acknowledged_that_cannot_be_recorded",
            "whichever_write_the_disk_is_full_at_nothing_is_lost",
            "a_disk_that_is_full_has_room_again_once_something_is_deleted",
            "a_daemon_that_is_started_on_a_full_disk_keeps_the_boxes_that_it_finds",
        ],
    ),
    (
        "the host does not see its files; the feature `vm` has tests of its own",
        &[
            "a_damaged_file_of_any_kind_costs_the_memory_and_never_the_files",
            "a_fork_of_a_damaged_snapshot_is_refused_and_the_agent_goes_on",
        ],
    ),
    (
        "CRIU has no part in it",
        &[
            "a_restore_that_does_not_come_to_an_end_is_given_up_and_the_memory_is_not",
            "a_criu_that_is_killed_at_its_work_costs_no_memory",
            "a_criu_that_is_killed_leaves_nothing_in_the_way_of_the_next",
            "where_no_criu_is_found_memory_stays_where_it_is_and_all_else_goes_on",
            "an_image_that_is_given_up_leaves_no_strange_files_in_the_home",
        ],
    ),
    (
        "there is nothing in it that cannot be saved",
        &["what_cannot_be_saved_is_named_and_goes_on"],
    ),
    (
        "ports are reached through the guest, whose connections end at a snapshot",
        &[
            "connections_to_ports_outlive_live_snapshots_and_forks",
            "code_goes_on_over_snapshots_forks_and_sleeps",
        ],
    ),
    (
        "the process that is looked at is QEMU",
        &["no_descriptor_of_the_host_is_open_in_a_box"],
    ),
];
