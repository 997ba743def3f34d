/* exec_watch.h - checks for `kvant exec` that the program's cache became kvant's, and says one line
 * where it did not. */
#ifndef KVANT_TOOLS_EXEC_WATCH_H
#define KVANT_TOOLS_EXEC_WATCH_H

/* Starts a process that watches the program which this process is about to become, and sets
 * KVANT_WATCH, by which the plug-in finds that process. It is no child of the program, has no part
 * in its signals and its terminal, and ends with the program at the latest. plugin is the path of
 * the plug-in. Linux before 5.3 has no means to watch a process, and process 1 of a container would
 * become the parent: then nothing is watched and nothing is said. */
void watch_start(const char *plugin);

#endif /* KVANT_TOOLS_EXEC_WATCH_H */
