/* exec_watch_none.c - exec_watch.h for systems on which kvant cannot look at another program's
 * files. There exec says no line when a program's cache does not become kvant's. */
#include "exec_watch.h"

void watch_start(const char *plugin)
{
    (void)plugin;
}
