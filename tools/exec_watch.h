/* exec_watch.h - checks for `kvant exec` that the program's cache became kvant's, and says one line
 * where it did not. */
#pragma once

/* Starts a process that watches the program that this process is about to become, and sets
 * KVANT_WATCH, by which the plug-in finds the watching process. The watching process is not a child
 * of the program, does not receive its signals or use its terminal, and ends when the program does.
 * `plugin` is the path of the plug-in. Nothing is watched or printed on Linux before 5.3, which
 * cannot watch a process, and in process 1 of a container, which would become the parent. */
void watch_start(const char *plugin);
