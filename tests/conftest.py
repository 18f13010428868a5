"""What the tests share: the agent as a process, the agent on a terminal, nothing left behind.

Nothing here knows the agent's code. A test gets it through three fixtures:

    run_agent("hi", server=server)     run it to its end: returncode, stdout, stderr
    start_agent("hi", server=server)   start it: a Popen to be signalled, read and waited for
    terminal("--mode", "ask", server=server)   start it under a pty: expect, send, interrupt, wait

Each makes sure that no traceback was shown, that the server found nothing wrong with any
request, and that no process stays.
"""

import codecs
import fcntl
import gc
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis.configuration import set_hypothesis_home_dir

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

KEY = "test-key"
NAP = f"9{os.getpid():08}.5"  # Seconds to sleep that no command of another test run has.
ESCAPES = re.compile(
    r"\x1b(?:\[[0-9;?<>=]*[@-~]?|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[()][0-9A-Z]?|[=>78]?)|[\x01\x02\x07]"
)
PROMPT = re.compile(r"(?:^|[\r\n])> (?:\r*\n[^\r\n]+)?$")  # with a status line below
QUESTION = re.compile(r"\? \[y(?:es)?/n(?:/a)?(?:/d)?\] $")
# Popen did setsid; this makes fd 0 the controlling terminal and then becomes the command.
ADOPT = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


HYPOTHESIS_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker of the slow tier known; what Hypothesis keeps goes away with the run."""
    folder = tempfile.TemporaryDirectory(prefix="hypothesis-")
    config.stash[HYPOTHESIS_FOLDER] = folder
    set_hypothesis_home_dir(folder.name)
    config.addinivalue_line("markers", "long: the full counts; run with `pytest -m long`")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # What a shell starts with "&".
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # Under nohup: only we ignore it.
        signal.signal(signal.SIGHUP, lambda number, frame: None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Here and not in a clean-up of the configuration, which the workers of xdist leave out."""
    session.config.stash[HYPOTHESIS_FOLDER].cleanup()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """To look for garbage among what collecting makes, all of which stays, is half of its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# What costs most in the quick tier: how many cases of a test belong to it, the others are long.
QUICK_CASES = {
    # test_agent.py
    "test_whatever_comes_the_turns_end_and_the_task_survives": 2,
    "test_anything_but_yes_is_no": 1,
    "test_no_limit_is_no_limit": 0,
    "test_a_note_that_is_none_changes_nothing_and_says_so": 2,
    "test_a_hook_that_fails_is_reported_once_and_nothing_else_happens": 2,
    "test_a_call_that_a_hook_changed_is_judged_again": 3,
    "test_ctrl_c_in_a_hook_ends_the_turn_and_all_that_the_hook_started": 1,
    "test_the_rules_that_are_named_permit_the_call": 2,
    "test_notes_that_are_a_link_to_a_secret_are_not_read": 3,
    "test_looking_for_notes_that_are_not_there_does_not_search_the_tree": 0,
    # test_approval.py
    "test_the_flags_that_stderr_names_permit_what_was_refused": 0,
    # test_calls.py
    "test_odd_forms_of_arguments_lose_nothing_when_a_file_is_written": 12,
    "test_odd_forms_of_arguments_are_the_same_for_every_tool": 7,
    "test_no_arguments_are_no_arguments": 2,
    "test_what_is_clear_is_repaired_for_a_tool_that_reads": 6,
    "test_a_search_with_almost_right_arguments_finds_the_lines": 1,
    "test_what_is_not_clear_is_not_run_and_the_model_is_told_what_and_where": 6,
    "test_arguments_of_what_has_effects_are_never_repaired": 14,
    "test_of_a_cut_reply_nothing_is_run": 10,
    "test_a_malformed_call_does_not_spoil_the_session": 2,
    "test_a_wrong_call_runs_nothing_and_is_answered_with_the_signature": 10,
    "test_names_that_models_invent_for_parameters_do_what_was_meant": 6,
    "test_all_is_only_on_when_it_says_so": 9,
    "test_a_name_in_other_case_or_with_a_prefix_is_the_tool": 5,
    "test_an_unknown_tool_is_answered_with_the_nearest_names": 3,
    "test_another_spelling_of_a_name_is_no_way_around_a_refusal": 6,
    "test_a_call_that_fails_leaves_the_others_their_results": 3,
    # test_cli.py
    "test_stream_json_is_one_event_a_line": 0,
    "test_a_wrong_key_is_refused_with_41": 0,
    "test_print_shows_only_the_final_answer_also_on_a_terminal": 0,
    "test_a_redirect_is_reported_and_not_followed": 0,
    "test_more_data_than_a_prompt_takes_is_cut_and_that_is_told": 0,
    "test_a_stdin_that_can_not_be_read_is_no_traceback": 1,
    "test_yes_runs_the_tools_for_real": 1,
    "test_stdout_carries_only_the_final_answer": 0,
    "test_options_may_stand_between_the_words_of_the_prompt": 0,
    "test_a_prompt_may_start_with_a_dash": 1,
    "test_an_unknown_flag_is_a_usage_error": 2,
    "test_a_wrong_value_of_a_flag_is_a_usage_error": 2,
    "test_a_dash_waits_for_the_end_of_a_slow_pipe": 0,
    "test_an_open_silent_pipe_is_not_waited_for": 0,
    "test_a_lone_surrogate_on_the_command_line_becomes_valid_text": 0,
    "test_piped_bytes_that_are_not_unicode_become_valid_text": 0,
    "test_the_variables_of_openai_are_a_fallback": 0,
    "test_a_refusal_ends_at_once_with_the_words_of_the_server": 0,
    "test_a_passing_failure_is_retried_four_times_and_each_time_announced": 1,
    "test_the_retry_events_count_to_four": 0,
    "test_a_success_after_a_rate_limit_is_a_success": 0,
    "test_a_reply_that_broke_off_is_asked_again": 1,
    "test_a_call_that_broke_off_is_not_run": 0,
    "test_a_call_of_a_reply_that_was_cut_by_the_length_limit_is_not_run": 0,
    "test_a_netrc_entry_does_not_replace_the_key": 0,
    "test_the_key_appears_nowhere": 0,
    "test_a_key_that_no_header_can_carry_is_one_line_that_does_not_show_it": 1,
    "test_with_nobody_there_a_change_is_denied_and_the_turn_goes_on": 1,
    "test_the_rule_that_was_named_permits_the_change": 0,
    "test_an_open_silent_pipe_does_not_make_the_agent_wait_for_a_yes": 0,
    "test_plan_mode_refuses_changes": 1,
    "test_reading_works_in_each_mode": 0,
    "test_a_path_outside_the_workspace_is_refused": 1,
    "test_malformed_arguments_are_not_run_and_leave_valid_history": 0,
    "test_an_unknown_tool_is_answered_and_the_turn_goes_on": 0,
    "test_one_failure_does_not_cancel_the_calls_beside_it": 0,
    "test_odd_bytes_in_the_output_of_a_command_make_valid_requests": 0,
    "test_a_command_reads_nothing_and_has_no_terminal": 0,
    "test_a_timeout_ends_the_group_and_keeps_the_output": 0,
    "test_a_tree_of_1200_folders_in_one_another_is_listed_and_searched": 0,
    "test_a_workspace_that_a_command_removed_is_an_error_for_the_model": 0,
    "test_commands_run_also_when_the_program_was_replaced_meanwhile": 0,
    "test_bare_leaves_agents_md_and_the_user_config_out": 0,
    "test_a_note_is_not_kept_when_nobody_is_there": 1,
    "test_yes_is_not_a_human_who_allows_a_change_of_agents_md": 1,
    "test_calls_in_the_last_reply_of_a_budget_are_not_run": 0,
    "test_a_repeated_call_with_new_results_is_no_loop": 0,
    "test_two_empty_replies_end_the_turn": 0,
    "test_session_files_are_for_the_user_alone": 0,
    "test_a_session_is_resumed": 1,
    "test_a_prompt_behind_resume_is_no_id": 0,
    "test_the_second_run_goes_on_where_the_first_one_stopped": 0,
    "test_the_session_as_it_was_before_the_last_turn_is_kept_beside_it": 0,
    "test_the_whole_output_of_a_command_is_kept_and_can_be_read": 0,
    "test_finished_results_survive_a_server_that_goes_away": 0,
    "test_an_id_that_fits_none_or_two_is_an_error": 2,
    "test_nothing_to_resume_is_a_notice_and_a_new_session": 0,
    "test_a_fork_leaves_the_old_session_alone": 1,
    "test_a_session_that_may_have_come_with_the_repository_needs_a_human": 1,
    "test_no_session_keeps_nothing_on_disk": 0,
    "test_a_lone_session_that_is_held_leads_to_a_new_one": 0,
    "test_a_broken_session_that_is_asked_for_is_one_line_and_left_alone": 2,
    "test_a_bare_list_of_messages_is_a_session_and_unknown_keys_are_kept": 0,
    "test_a_damaged_history_is_healed_before_it_is_sent": 0,
    "test_a_state_folder_that_a_command_removed_is_made_again": 0,
    "test_a_link_in_place_of_the_sessions_is_one_notice_and_not_written_through": 0,
    "test_the_workspace_may_be_another_folder": 1,
    "test_a_mistake_in_the_config_is_named_in_one_line": 1,
    "test_the_config_is_weaker_than_the_environment_and_that_than_a_flag": 0,
    "test_where_nothing_can_be_saved_one_notice_is_given_and_the_work_goes_on": 0,
    "test_a_read_only_disk_is_one_notice": 0,
    "test_where_the_sandbox_does_not_work_only_on_refuses_to_start": 1,
    "test_json_lists_what_was_denied": 0,
    "test_json_is_printed_on_failure_too": 0,
    "test_a_signal_while_the_model_streams_leaves_a_valid_session": 0,
    "test_a_signal_while_a_command_runs_ends_its_whole_group": 0,
    "test_a_second_signal_while_a_stubborn_command_ends_loses_nothing_it_printed": 0,
    "test_an_interrupt_during_a_retry_wait_ends_the_wait": 0,
    "test_an_interrupt_is_a_cancelled_result_in_json": 0,
    "test_a_closed_stdout_is_no_traceback": 0,
    "test_a_reader_that_takes_one_byte_is_no_traceback": 0,
    "test_output_that_can_not_be_written_is_an_error_in_one_line": 1,
    "test_a_background_job_ends_with_the_agent": 0,
    "test_the_agent_greps_reads_edits_and_tests_a_copy_of_itself": 0,
    # test_client.py
    "test_an_endpoint_that_lists_no_models_is_an_error_that_names_it": 2,
    "test_an_entry_in_netrc_does_not_replace_the_key": 1,
    # test_commands.py
    "test_the_last_line_says_how_it_ended": 4,
    "test_a_command_that_stops_its_host_holds_nobody_up": 0,
    "test_git_fails_at_once_where_it_would_open_an_editor": 1,
    "test_the_editors_of_the_user_are_not_opened_either": 0,
    "test_a_rebase_that_stopped_does_not_open_an_editor_either": 0,
    "test_a_long_history_comes_whole_and_without_a_pager": 0,
    "test_a_program_for_a_person_ends_by_itself": 0,
    "test_a_password_for_a_signature_can_not_be_given": 0,
    "test_what_is_for_a_terminal_is_taken_out_wherever_it_is_split": 8,
    "test_of_much_output_head_and_tail_are_shown_and_all_of_it_is_kept": 2,
    "test_the_file_of_a_flood_stops_at_50_megabytes_and_the_result_says_so": 0,
    "test_memory_stays_flat_whatever_a_flood_consists_of": 0,
    "test_ctrl_c_ends_the_whole_tree_and_keeps_the_output": 1,
    "test_a_flood_without_end_is_cut_by_the_timeout_with_its_last_lines": 0,
    "test_a_server_in_the_foreground_times_out_with_what_it_said_and_advice": 0,
    "test_a_background_process_holds_nobody_up_and_is_named": 2,
    "test_many_background_processes_leave_room_for_the_output": 0,
    "test_a_job_is_ended_with_everything_below_it": 0,
    "test_what_is_no_job_is_not_ended": 0,
    "test_jobs_without_jobs_says_so_and_help_names_it": 0,
    "test_jobs_of_the_user_are_jobs_too": 0,
    "test_every_job_ends_with_the_agent": 1,
    "test_every_job_ends_with_the_conversation": 0,
    "test_a_failure_that_mentions_a_withheld_key_says_so": 1,
    "test_commands_see_no_key_but_those_that_the_user_keeps": 1,
    "test_a_key_beside_the_config_is_not_in_the_environment_either": 0,
    "test_a_wrong_list_of_names_is_named": 1,
    "test_a_command_may_hold_letters_that_the_locale_does_not_know": 0,
    # test_compaction.py
    "test_each_request_of_a_long_task_begins_with_the_one_before": 1,
    "test_a_giant_reply_is_clipped_and_the_turn_goes_on": 2,
    # test_edits.py
    "test_an_edit_changes_exactly_its_place": 12,
    "test_an_edit_keeps_the_encoding_of_utf_16": 3,
    "test_what_can_not_be_edited_without_loss_is_left_alone": 4,
    "test_all_can_be_turned_off_in_any_spelling": 2,
    "test_an_edit_that_fits_several_places_names_their_lines": 3,
    "test_an_edit_that_is_none_changes_nothing_and_says_so": 4,
    "test_a_miss_shows_the_nearest_lines_and_why_they_differ": 4,
    "test_a_call_that_copies_what_the_error_shows_succeeds": 4,
    "test_a_miss_is_answered_soon_and_briefly_whatever_the_sizes": 1,
    "test_a_changed_file_keeps_its_mode": 4,
    "test_a_file_whose_owner_can_not_be_kept_is_written_in_place": 0,
    "test_a_new_file_gets_the_mode_that_the_umask_leaves": 2,
    "test_a_new_file_holds_exactly_what_was_sent": 4,
    "test_all_names_of_a_file_change_and_the_result_says_so": 2,
    "test_a_hard_link_in_an_installed_package_is_asked_for": 6,
    "test_a_link_is_followed_and_stays": 3,
    "test_a_link_that_leads_out_is_not_followed": 2,
    "test_a_write_that_fails_half_way_leaves_the_old_bytes": 0,
    "test_changes_of_one_file_in_one_reply_are_made_in_order": 4,
    "test_a_file_that_the_user_changed_since_is_not_overwritten": 3,
    "test_a_replaced_file_keeps_its_encoding_or_the_result_says_what_it_lost": 3,
    "test_a_name_of_any_form_is_taken_literally": 6,
    "test_what_is_no_file_is_not_written_either": 1,
    "test_a_binary_file_is_named_with_its_size_and_kind": 3,
    "test_any_text_can_be_read_as_valid_unicode": 4,
    "test_the_numbers_of_lines_are_those_of_grep_and_of_the_other_tools": 1,
    "test_a_range_may_be_given_in_any_form_of_number": 2,
    "test_a_long_file_comes_in_pages_that_together_are_the_file": 1,
    "test_the_rest_of_a_long_line_comes_by_the_command_that_is_named": 3,
    "test_a_path_that_does_not_exist_is_answered_with_similar_ones": 3,
    "test_a_range_near_the_front_costs_the_same_whatever_the_size_of_the_file": 0,
    "test_a_miss_tells_what_old_may_be_instead": 4,
    "test_a_mark_is_not_doubled": 2,
    "test_two_agents_that_write_in_one_folder_do_not_disturb_each_other": 0,
    # test_effects.py
    "test_a_secret_is_not_read_by_any_of_its_names": 1,
    "test_a_command_that_names_a_secret_does_not_show_it": 1,
    "test_the_file_tools_write_nothing_that_is_foreign_or_protected": 1,
    "test_what_is_swapped_for_a_link_while_the_question_stands_is_not_written_through": 2,
    "test_writes_while_a_folder_is_swapped_for_a_link_stay_inside": 1,
    "test_writes_while_a_file_is_swapped_for_a_link_stay_inside": 0,
    "test_an_undo_manifest_that_names_a_foreign_path_restores_nothing_there": 1,
    "test_looking_at_a_hostile_repository_runs_nothing_of_it": 3,
    "test_looking_into_a_repository_inside_runs_nothing_of_it": 1,
    "test_a_pager_of_the_repository_is_silent_under_a_terminal": 0,
    # test_flaky_server.py
    "test_every_fault_works_with_and_without_text_and_calls": 40,
    "test_a_bad_script_file_is_one_line_and_2": 1,
    # test_headless.py
    "test_a_folder_that_was_removed_under_the_agent_is_a_2_in_json_too": 1,
    "test_a_python_that_lacks_something_is_one_line_that_names_it": 1,
    "test_a_reader_that_left_costs_neither_the_session_nor_a_traceback": 1,
    "test_without_an_open_stream_the_work_is_done_and_the_session_is_saved": 1,
    "test_progress_is_on_stderr_in_every_format": 1,
    "test_a_signal_is_the_strongest_code_and_the_lines_end_with_the_result": 9,
    # test_hooks.py
    "test_any_other_failure_warns_once_and_the_call_runs": 2,
    # test_kill.py
    "test_a_task_that_is_killed_five_times_is_finished_without_a_lie": 0,
    # test_loops.py
    "test_a_reply_without_end_is_cut_whatever_it_says": 1,
    # test_permissions.py
    "test_a_path_that_is_denied_to_all_tools_is_denied_to_commands": 15,
    "test_what_a_run_reports_as_permitting_really_permits": 2,
    # test_providers.py
    "test_the_flag_decides_the_host_and_the_key_variable_of_the_row_is_enough": 1,
    "test_a_hosted_row_without_a_key_names_its_variable": 1,
    "test_the_model_that_answered_is_kept_with_the_reply": 0,
    "test_no_proxy_stands_between_the_agent_and_this_machine": 1,
    "test_a_provider_that_can_not_be_used_changes_nothing": 1,
    "test_model_alone_says_which_is_used_where_the_server_lists_none": 0,
    "test_a_key_in_a_list_of_models_is_not_shown": 0,
    "test_the_history_of_one_provider_is_taken_by_another": 8,
    "test_another_model_of_the_same_server_gets_no_extras_and_the_first_one_gets_its_own_back": 4,
    "test_status_marks_a_window_that_nobody_tells": 0,
    "test_a_window_is_read_anew_for_another_model": 0,
    "test_a_window_learned_from_an_overflow_is_shown": 0,
    "test_a_wait_is_counted_down_on_a_terminal": 0,
    # test_sandbox.py
    "test_a_protected_file_is_neither_changed_nor_removed_nor_renamed": 10,
    "test_a_new_protected_name_goes_to_quarantine_and_the_result_names_it": 10,
    "test_nothing_protected_stays_however_it_came": 9,
    "test_a_command_does_the_same_as_without_the_sandbox": 16,
    "test_the_workspace_may_be_in_any_place": 1,
    "test_rules_alone_catch_it": 6,
    "test_the_sandbox_catches_what_rules_do_not_see_being_written": 9,
    "test_the_first_event_says_whether_commands_are_in_the_sandbox": 2,
    "test_auto_says_once_why_there_is_none_and_goes_on": 0,
    "test_nothing_is_left_when_the_agent_is_ended": 1,
    # test_search.py
    "test_a_pattern_finds_exactly_these_files": 12,
    "test_pages_are_together_everything_once_and_each_carries_the_total": 1,
    "test_some_folders_are_always_skipped_and_the_result_names_them": 1,
    "test_one_skipped_folder_is_said_to_be_skipped": 1,
    "test_a_skipped_folder_that_is_named_is_searched": 1,
    "test_what_is_ignored_is_left_out_and_counted": 1,
    "test_an_ignored_folder_is_left_out_and_said": 1,
    "test_an_ignored_path_that_is_named_is_searched": 2,
    "test_a_folder_in_which_all_is_ignored_is_not_said_to_hold_nothing": 2,
    "test_without_git_what_is_ignored_is_left_out_or_said_to_be_there": 1,
    "test_a_second_working_tree_of_a_repository_is_searched": 0,
    "test_where_git_can_not_read_its_repository_its_lists_are_respected_all_the_same": 1,
    "test_lists_that_only_rg_knows_change_nothing": 0,
    "test_what_is_ignored_is_what_git_ignores": 0,
    "test_context_lines_are_shown_once_and_marked": 1,
    "test_a_line_has_the_number_that_grep_and_the_reader_give_it": 4,
    "test_a_match_in_a_huge_line_shows_the_window_around_it": 1,
    "test_a_match_that_is_huge_or_empty_in_a_huge_line_is_shown_in_part": 1,
    "test_a_match_deep_in_a_large_file_has_its_number": 0,
    "test_an_invalid_regex_is_an_error_with_pythons_reason_and_a_hint": 8,
    "test_a_regex_that_is_too_deep_ends_neither_the_search_nor_the_agent": 1,
    "test_a_regex_that_python_warns_about_is_searched_without_a_warning_on_the_screen": 0,
    "test_a_catastrophic_regex_ends_in_an_error_and_the_next_calls_work": 0,
    "test_a_regex_that_only_looks_dangerous_is_searched": 1,
    "test_ctrl_c_ends_a_catastrophic_search_at_once_and_the_session_goes_on": 0,
    "test_a_signal_during_a_catastrophic_search_leaves_no_process": 1,
    "test_links_in_circles_and_out_of_the_workspace_are_not_followed": 1,
    "test_a_link_out_of_the_workspace_is_refused": 3,
    "test_what_can_not_be_read_is_counted_and_the_rest_is_found": 1,
    "test_a_file_of_three_gigabytes_is_searched_or_counted_in_flat_memory": 0,
    "test_a_name_that_is_no_text_takes_one_line_and_breaks_nothing": 2,
    "test_a_name_is_taken_literally": 0,
    "test_without_rg_all_regexes_find_what_the_reference_finds": 0,
    "test_with_rg_all_regexes_find_what_the_reference_finds": 0,
    "test_with_and_without_rg_the_results_are_equal_to_the_letter": 0,
    "test_with_an_rg_that_fails_the_results_are_the_same": 0,
    "test_what_the_user_set_for_rg_does_not_change_a_search": 0,
    "test_a_regex_and_a_name_that_look_like_options_are_none": 1,
    "test_a_search_lets_git_fetch_nothing_that_is_missing": 1,
    "test_binary_files_are_counted_alike_with_and_without_rg": 0,
    "test_a_comment_in_a_regex_is_no_text_and_what_it_ends_may_be_missing": 1,
    # test_secrets.py
    "test_a_state_folder_that_may_be_somebody_elses_is_not_used_and_named_once": 1,
    "test_invisible_characters_in_output_are_escaped_and_reported": 2,
    # test_sessions.py
    "test_an_odd_header_does_not_end_a_run": 3,
    "test_a_session_that_git_tracks_is_not_resumed_without_a_humans_yes": 1,
    "test_processes_that_start_in_the_same_second_get_different_ids": 0,
    "test_a_save_that_is_killed_leaves_the_old_or_the_new_file": 0,
    # test_terminal.py
    "test_ctrl_c_clears_a_draft_and_does_not_leave": 0,
    "test_a_closed_window_ends_the_agent_and_its_command": 0,
    "test_a_closed_window_at_the_prompt_ends_the_agent": 0,
    "test_sigterm_at_the_prompt_gives_the_terminal_back": 0,
    "test_y_permits_what_was_shown": 0,
    "test_a_question_of_the_model_is_answered_by_the_user": 1,
    "test_ctrl_d_right_behind_a_prompt_sends_it_and_leaves": 1,
    "test_a_turn_has_a_spinner_and_leaves_nothing_of_it": 0,
    "test_without_colours_the_extra_shows_nothing": 0,
    "test_a_question_rings_unless_the_config_says_no": 0,
    "test_retry_asks_again_and_says_when_there_is_nothing": 0,
    "test_the_projects_command_is_refused_by_whoever_does_not_say_yes": 0,
    "test_copy_goes_through_a_terminal_only_if_it_takes_codes": 1,
    "test_without_codes_the_line_editor_writes_none_either": 1,
    "test_a_prompt_on_the_command_line_of_a_terminal_is_answered_and_ends": 0,
    "test_a_session_is_resumed_at_the_prompt": 0,
    "test_ctrl_c_before_the_first_word_adds_no_reply": 0,
    "test_ctrl_c_in_the_middle_of_a_call_does_not_run_it": 0,
    "test_ctrl_c_ends_a_command_that_ignores_it": 0,
    "test_ctrl_c_twice_in_a_row_while_a_command_runs_harms_nothing": 0,
    "test_a_second_ctrl_c_leaves_nothing_of_a_command_of_the_user": 0,
    "test_ctrl_c_at_three_random_moments": 0,
    "test_ctrl_c_during_a_retry_wait_gives_the_prompt_back": 0,
    "test_leaving_says_how_to_come_back": 1,
    "test_a_keeps_a_rule_for_the_session": 1,
    "test_a_long_command_wants_a_whole_yes": 0,
    "test_a_long_diff_is_shown_whole_on_d": 0,
    "test_what_can_not_be_seen_is_shown": 0,
    "test_a_paste_is_never_a_yes": 1,
    "test_a_flag_for_unattended_use_means_nobody_is_asked": 0,
    "test_a_note_is_kept_only_after_a_yes": 1,
    "test_writing_agents_md_asks_a_human_even_in_auto_mode": 0,
    "test_a_paste_of_three_lines_is_one_prompt": 0,
    "test_a_paste_with_the_line_ends_of_windows_is_its_lines_and_nothing_else": 0,
    "test_an_unknown_command_or_mode_is_not_sent_to_the_model": 1,
    "test_an_empty_line_sends_nothing": 0,
    "test_colours_can_be_turned_off": 0,
    "test_no_file_is_left_in_the_home_folder_but_the_history": 0,
    # test_tools.py
    "test_a_parameter_named_path_may_be_of_any_kind": 3,
    "test_names_that_models_invent_are_understood": 4,
    "test_a_number_of_any_length_is_taken_or_refused_in_words": 4,
    "test_files_are_listed_by_pattern": 5,
    "test_pages_hold_each_row_once_in_the_same_order": 0,
    "test_lines_are_found": 5,
    "test_an_invalid_regex_is_an_error_with_the_reason": 1,
    "test_offsets_and_contexts_out_of_range_are_brought_into_range_or_counted": 3,
    "test_a_denied_path_is_not_searched_also_where_the_call_does_not_name_it": 3,
    "test_a_text_in_which_a_character_was_lost_is_not_written": 4,
    "test_an_edit_that_is_not_clear_changes_nothing_and_says_why": 6,
    "test_the_exit_code_stands_last": 4,
    "test_the_whole_of_a_clipped_output_can_be_read": 1,
    "test_an_odd_timeout_is_brought_into_range": 2,
    "test_a_background_loop_belongs_to_the_call_that_began_it": 1,
    "test_what_a_server_sends_is_read_or_explained": 1,
    "test_only_web_addresses_are_fetched": 5,
    "test_a_private_host_is_refused_even_with_the_network_allowed": 9,
    # test_undo.py
    "test_a_file_that_was_changed_several_times_comes_back_as_it_was_first": 0,
    "test_mode_and_owner_come_back": 0,
    "test_a_folder_that_holds_something_of_the_user_by_now_stays": 0,
    "test_a_file_that_a_command_removed_after_the_edit_comes_back": 0,
    "test_what_is_done_after_an_undo_can_be_undone_too": 0,
    "test_a_turn_without_changes_is_a_turn": 0,
    "test_with_nothing_to_undo_it_is_said": 1,
    "test_what_is_no_number_of_turns_undoes_nothing": 0,
    "test_both_sessions_are_valid_after_an_undo": 0,
    "test_an_undone_turn_does_not_come_back_with_a_resume": 0,
    "test_a_file_that_the_user_changed_since_is_asked_for": 1,
    "test_a_made_file_that_the_user_changed_since_is_asked_for": 0,
    "test_what_was_done_before_a_kill_can_be_undone": 0,
    "test_a_kill_in_the_middle_of_a_write_can_be_undone": 0,
    "test_a_turn_that_was_interrupted_can_be_undone": 0,
    "test_a_protected_file_is_restored_only_after_a_yes": 1,
    "test_in_mode_ask_a_yes_is_enough": 0,
    "test_a_damaged_journal_damages_no_file": 1,
    "test_diff_shows_nothing_where_nothing_is_changed_or_all_is_undone": 0,
    "test_diff_of_a_resumed_session_and_of_one_turn_of_two_that_is_undone": 0,
    "test_diff_shows_odd_files_without_harm": 1,
    "test_a_write_that_failed_is_no_change_of_the_user": 0,
    "test_a_write_that_was_killed_before_it_began_is_no_change_of_the_user": 0,
    "test_turns_of_which_the_first_was_compacted_are_undone_together": 0,
    "test_after_a_no_the_next_undo_asks_again": 0,
    "test_what_a_no_left_is_undone_after_a_resume_and_nothing_stays_for_diff": 0,
    "test_a_change_of_an_empty_file_is_undone_where_nothing_is_kept": 0,
    "test_a_line_that_a_kill_has_torn_does_not_swallow_the_next": 0,
    "test_a_file_that_a_command_removed_comes_back_to_its_owner": 0,
    "test_an_odd_journal_ends_neither_the_undo_nor_the_agent": 0,
    "test_turns_that_begin_nowhere_do_not_end_the_agent": 2,
    # test_web.py
    "test_nothing_reaches_this_machine_when_no_rule_names_it": 6,
    "test_the_host_itself_must_be_named": 6,
    "test_each_hop_of_a_redirect_is_checked_like_the_first": 13,
    "test_a_name_that_turns_out_to_be_this_machine_gets_no_request": 1,
    "test_a_redirect_to_a_name_that_is_rebound_gets_no_request": 0,
    "test_a_body_without_end_is_cut_in_small_memory_and_said_to_be_cut": 1,
    "test_a_page_may_say_its_letters_itself": 1,
    "test_a_page_keeps_its_links_tables_code_and_lists": 1,
    "test_a_page_loses_what_is_no_text": 1,
    "test_a_page_of_hostile_shape_is_read_in_time": 1,
    "test_the_plain_reader_needs_no_more_than_its_time": 1,
    "test_what_another_reader_would_lose_is_kept": 0,
    # test_wire.py
    "test_an_answer_of_the_field_is_taken_as_it_was_meant": 200,
    "test_a_request_has_the_form_that_the_server_wants": 40,
    # test_wire_cli.py
    "test_a_broken_stream_runs_nothing_and_leaves_nothing_behind": 1,
    "test_an_error_inside_a_200_is_what_the_same_status_is": 1,
    "test_no_chaos_of_indexes_and_ids_loses_or_mixes_a_call": 0,
    "test_arguments_that_are_no_json_object_stay_in_no_history": 0,
    "test_a_call_cut_by_the_length_is_not_run_and_the_model_is_told": 1,
    "test_separators_and_characters_that_are_split_over_reads_come_through": 1,
    "test_a_wait_of_hours_is_reported_and_not_slept_through": 1,
    "test_an_empty_account_ends_the_turn_whatever_the_headers_promise": 0,
    "test_a_second_overflow_ends_the_turn": 0,
    "test_an_overflow_that_nothing_can_mend_is_one_request": 0,
    "test_reasoning_goes_back_as_it_came_and_to_no_other_model": 1,
    "test_roles_that_must_alternate_are_mended_once_and_on_the_wire_only": 1,
    "test_a_key_that_the_server_echoes_is_shown_nowhere": 1,
    "test_a_key_that_a_command_prints_is_shown_and_sent_nowhere": 0,
    "test_the_trace_of_a_crash_holds_no_key": 1,
    # test_workspace.py
    "test_a_timeout_ends_what_does_not_want_to_end": 0,
    "test_a_flood_keeps_memory_flat_and_the_file_whole": 1,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the slow tier out unless it was asked for."""
    seen: dict[str, int] = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        place = f"{item.path}:{name}"  # Two files may have a test of the same name.
        seen[place] = seen.get(place, 0) + 1
        if seen[place] > QUICK_CASES.get(name, len(items)):
            item.add_marker(pytest.mark.long)
    if "long" in config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


# -- looking at what is there --------------------------------------------------------------------


def until(condition: Callable[[], object], timeout: float = 60.0) -> object:
    """Wait until the condition is true and return what it said; fail after the timeout."""
    deadline, pause = time.monotonic() + timeout, 0.005
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout} s in vain"
        time.sleep(pause)
        pause = min(2 * pause, 0.04)  # To look at all processes is not for nothing.
    return value


def processes(matches: Callable[[Path], bool]) -> list[int]:
    """Ids of the other living processes whose /proc folder matches."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and matches(folder):
                found.append(int(folder.name))
        except OSError:  # It ended while we looked at it.
            continue
    return found


def alive(marker: str) -> list[int]:
    """Ids of the processes with the marker in their command line (a zombie has none)."""
    return processes(lambda folder: marker.encode() in (folder / "cmdline").read_bytes())


def inside(folder: Path) -> list[int]:
    """Ids of the processes that work in the folder or name it in their command line."""
    name = str(folder)

    def matches(process: Path) -> bool:
        cwd = os.readlink(process / "cwd")
        return (
            cwd == name
            or cwd.startswith(name + "/")
            or name.encode() in (process / "cmdline").read_bytes()
        )

    return processes(matches)


def children() -> list[int]:
    """Ids of the living children of the test run."""

    def matches(process: Path) -> bool:
        state, parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[:2]
        return state != "Z" and int(parent) == os.getpid()

    return processes(matches)


def session_files(workspace: Path) -> list[Path]:
    """The session files of a workspace, oldest name first."""
    return sorted((workspace / ".agent" / "sessions").glob("*.json"))


def put_session(workspace: Path, ident: str, messages: list[dict], **keys: object) -> Path:
    """Write a session as an earlier run would have left it; a later id is a later session."""
    day = f"{ident[:4]}-{ident[4:6]}-{ident[6:8]}T{ident[9:11]}:{ident[11:13]}:{ident[13:15]}+00:00"
    body = {
        "version": 1,
        "id": ident,
        "created": day,
        "updated": day,
        "root": str(workspace),
        "model": "flaky-1",
    }
    body |= {
        "base_url": "",
        "title": messages[1]["content"],
        "usage": {},
        "files": {},
        "messages": messages,
    } | keys
    path = workspace / ".agent" / "sessions" / f"{ident}.json"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1))
    stamp = time.mktime(time.strptime(ident[:15], "%Y%m%d-%H%M%S"))
    os.utime(path, (stamp, stamp))
    return path


def talk(question: str, answer: str) -> list[dict]:
    """The messages of a session with one question and its answer."""
    system = {"role": "system", "content": "You are a coding agent."}
    return [system, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def results(request: dict) -> list[str]:
    """The results of tool calls that a request carries, in order."""
    return [message["content"] for message in request["messages"] if message["role"] == "tool"]


def prompts(request: dict) -> list[str]:
    """What the user said, in order, as a request carries it."""
    return [message["content"] for message in request["messages"] if message["role"] == "user"]


def roles(request: dict) -> list[str]:
    """The roles of the messages of a request."""
    return [message["role"] for message in request["messages"]]


# -- the agent as a process ----------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """An empty folder for the agent to work in."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def environment(home: Path) -> Callable[..., dict[str, str]]:
    """Build the clean environment of an agent; a change to None removes the variable.

    Without `ui` its packages can not be imported, as on a machine where the extra is not installed.
    """

    def build(
        server: object = None, changes: dict[str, str | None] | None = None, *, ui: bool = False
    ) -> dict[str, str]:
        clean: dict[str, str | None] = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(home),
            "TERM": "xterm",
            "PYTHONPATH": str(ROOT) if ui else f"{ROOT / 'tests' / 'without_ui'}:{ROOT}",
            "AGENT_API_KEY": KEY,
            "AGENT_MODEL": "flaky-1",
            "AGENT_BASE_URL": getattr(server, "url", None),
        }
        return {
            name: value for name, value in (clean | (changes or {})).items() if value is not None
        }

    return build


@pytest.fixture
def start_agent(tmp_path: Path, workspace: Path, environment: Callable) -> Iterator[Callable]:
    """Start the agent as a child; at the end of the test it is gone and left nothing running."""
    started: list[subprocess.Popen] = []
    servers = []

    def start(
        *args, server=None, cwd=None, env=None, stdin=subprocess.DEVNULL, under=(), **options
    ) -> subprocess.Popen:
        command = [*under, sys.executable, "-m", "agent", *args]
        texts = {
            "encoding": "utf-8",
            "errors": "replace",
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        place = {"cwd": cwd or workspace, "env": environment(server, env)}
        started.append(subprocess.Popen(command, stdin=stdin, **(texts | place | options)))
        servers.append(server)
        return started[-1]

    yield start
    for process in started:
        end(process)
    assert [
        reason for server in servers if server for r in server.requests for reason in r.problems
    ] == []
    nothing_runs_in(tmp_path)


@pytest.fixture
def run_agent(start_agent: Callable) -> Callable:
    """Run the agent to its end: a CompletedProcess with text, and never a traceback."""

    def run(
        *args, server=None, input=None, cwd=None, env=None, timeout=60, under=()
    ) -> subprocess.CompletedProcess:
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        process = start_agent(*args, server=server, cwd=cwd, env=env, stdin=stdin, under=under)
        try:
            out, err = process.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"still running after {timeout} s\nstdout: {out}\nstderr: {err}")
        assert "Traceback" not in out + err, err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


def end(process: subprocess.Popen) -> None:
    """End a child if it still runs, and close its pipes."""
    if process.poll() is None:
        process.kill()
    process.wait(60)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            stream.close()


def nothing_runs_in(folder: Path) -> None:
    """Fail, and end them, if processes still work in the folder after a moment."""
    deadline = time.monotonic() + 30
    while (left := inside(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in left]
    for pid in left:
        os.kill(pid, 9)
    assert lines == [], "processes were left behind"


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """At the end of the run the tests have no child and no process that works in their folders."""
    before = set(children())
    yield
    deadline = time.monotonic() + 30
    while (left := set(children()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == set(), "children of the test run are left"


# -- the agent on a terminal ---------------------------------------------------------------------


class Terminal:
    """The agent under a terminal of 24 rows and 80 columns; `output` is all that it wrote."""

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str]):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.settings = termios.tcgetattr(self.slave)
        self.output = ""
        self.seen = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        adopt = [sys.executable, "-I", "-S", "-c", ADOPT, *command]
        ends = {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave}
        self.process = subprocess.Popen(adopt, cwd=cwd, env=env, start_new_session=True, **ends)

    @property
    def text(self) -> str:
        """All output without escape codes, bells and the marks of readline."""
        return ESCAPES.sub("", self.output)

    def read(self, seconds: float) -> bool:
        """Take in what comes within the time; False when nothing came."""
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        self.output += self.decoder.decode(os.read(self.master, 65536))
        return True

    def match(self, pattern: re.Pattern, timeout: float = 60) -> str:
        """Read until the pattern is behind what was expected last; return all up to its end."""
        deadline = time.monotonic() + timeout
        while not (found := pattern.search(self.text, self.seen)):
            over = self.process.poll() is not None and not self.read(0.1)
            if over or time.monotonic() > deadline:
                state = f"ended with {self.process.returncode}" if over else f"{timeout} s are over"
                raise AssertionError(f"no {pattern.pattern!r} ({state}); the screen:\n{self.text}")
            self.read(0.1)
        start, self.seen = self.seen, found.end()
        return self.text[start : self.seen]

    def expect(self, text: str, timeout: float = 60) -> str:
        """Read until the text is behind what was expected last; return all up to its end."""
        return self.match(re.compile(re.escape(text)), timeout)

    def prompt(self, timeout: float = 60) -> str:
        """Wait for the input prompt and return what was written before it."""
        shown = self.match(PROMPT, timeout)
        self.listens()
        return shown

    def question(self, timeout: float = 60) -> str:
        """Wait for a permission question and return what was written before it."""
        shown = self.match(QUESTION, timeout)
        self.listens()
        return shown

    def listens(self) -> None:
        """Wait until the process sleeps: input() shows its prompt a moment before it listens,
        and a signal in that moment is seen by Python only at the next key."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] in "SZ")

    def settle(self, timeout: float = 60) -> None:
        """Wait until nothing more comes and the input prompt is the last thing on the screen."""
        deadline = time.monotonic() + timeout
        while self.read(0.25) or not PROMPT.search(self.text):
            assert time.monotonic() < deadline, f"no prompt; the screen:\n{self.text}"
        self.seen = len(self.text)

    def send(self, text: str) -> None:
        """Type the text; Enter is a carriage return."""
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        """Type Ctrl-C."""
        self.send("\x03")

    def wait(self, timeout: float = 60) -> int:
        """Read to the end of the process and return its exit code."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running; the screen:\n{self.text}"
            self.read(0.05)
        while self.read(0):
            continue
        return self.process.returncode

    def hang_up(self) -> None:
        """Close the window."""
        os.close(self.slave)
        os.close(self.master)
        self.slave = self.master = -1

    def close(self) -> None:
        """End the process by its id and give the terminal back."""
        end(self.process)
        if self.master >= 0:
            self.hang_up()


@pytest.fixture
def terminal(tmp_path: Path, workspace: Path, environment: Callable) -> Iterator[Callable]:
    """Start the agent under a terminal; at the end it is gone and no traceback was seen."""
    open_terminals: list[Terminal] = []
    servers = []

    def start(*args, server=None, cwd=None, env=None, ui=False) -> Terminal:
        command = [sys.executable, "-m", "agent", *args]
        place = environment(server, env, ui=ui)
        open_terminals.append(Terminal(command, cwd or workspace, place))
        servers.append(server)
        return open_terminals[-1]

    yield start
    for screen in open_terminals:
        screen.close()
    assert [screen.text for screen in open_terminals if "Traceback" in screen.text] == []
    assert [
        reason for server in servers if server for r in server.requests for reason in r.problems
    ] == []
    nothing_runs_in(tmp_path)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder outside every workspace, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="agent-test-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable]:
    """Start a script as a second process; all of them are gone at the end of the test."""
    started: list[subprocess.Popen] = []

    def start(script: str, *args: object, under: tuple = ()) -> subprocess.Popen:
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [*under, sys.executable, "-c", script, *map(str, args)]
        started.append(subprocess.Popen(command, env=env, cwd=tmp_path, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
