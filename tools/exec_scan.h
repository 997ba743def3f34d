/* exec_scan.h - finds the processes of a program, and the libraries and models that these have
 * mapped or opened. It reads /proc, and skips processes that this user may not read. */
#pragma once

#include <stdbool.h>

typedef struct scan {
    bool alive;      /* one of the processes runs */
    bool ggml;       /* one has mapped a library of ggml's */
    bool plugin;     /* one has mapped the plug-in */
    bool mapped;     /* one has mapped a model */
    char model[256]; /* the name of a model's file that one has mapped or opened; else "" */
} scan;

/* Looks at every process whose environment has the word, which is "NAME=value". plugin is the path
 * of the plug-in. */
void scan_processes(const char *word, const char *plugin, scan *found);
