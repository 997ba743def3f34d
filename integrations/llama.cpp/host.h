/* host.h - the plug-in's functions on an operating system, in addition to src/base/os.h: its
 * caller, imported functions, reserved memory, files. host_posix.c has them for Linux and macOS,
 * host_windows.c for Windows. host_linux_imports.c has the functions on imports, and host_hints.c
 * the hints. No other file of the plug-in includes a header of a system or asks which system it is
 * (tests/docs/test_os.py). */
#pragma once

#include "../../src/base/os.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Opens the library that holds this address; NULL: unknown. */
void *kvp_host_library_of(const void *code);

/* A function that modules of the process import from a library, and the function that takes its
 * place. */
typedef struct kvp_import {
    const char *name;
    void *ours;
    void *theirs; /* the library's; NULL: no module imports it */
} kvp_import;

/* `kvp_host_find_imports` fills in `theirs`. False with a reason when modules import different
 * functions by one name, or import one in a way that cannot be replaced. `kvp_host_replace_imports`
 * makes all modules that are loaded now call ours. False when the memory cannot be written; then
 * nothing has changed. The library itself goes on calling its own functions, and so do modules that
 * look a function up by its name. */
bool kvp_host_find_imports(kvp_import *imports, size_t n, const char **why);
bool kvp_host_replace_imports(kvp_import *imports, size_t n);

/* Keeps the plug-in loaded until the process ends, because its threads run its code. */
void kvp_host_stay_loaded(void);

/* Whether llama.cpp's builds for this system may check that a buffer has room for each tensor as
 * its type says. A compressed tensor then reserves as much, which takes address space only. */
bool kvp_host_reserves_nominal_bytes(void);

/* Reserves addresses; NULL: there is no room. kvp_host_commit() turns a part of them into zeroed
 * memory, of which only pages that were written are resident. A part that is memory already stays
 * as it is. False: there is no memory. */
void *kvp_host_reserve(size_t bytes);
bool kvp_host_commit(void *at, size_t bytes);
void kvp_host_release(void *memory, size_t bytes);

/* Keeps the system from using huge pages for reserved memory. Such a page would make memory
 * resident that nobody wrote. */
void kvp_host_refuse_huge_pages(void *memory, size_t bytes);

/* Hints (host_hints.c).
 *   want_huge_pages  The system may use huge pages for reserved memory, which come faster.
 *   write_early      The system begins to write a part of a file while the program does other work.
 *   read_in_order    A file will be read in order.
 *   read_early       The system begins to read a part of it, so the disk has several requests. */
void kvp_host_want_huge_pages(void *memory, size_t bytes);
void kvp_host_write_early(int file, uint64_t first, size_t bytes);
void kvp_host_read_in_order(int file);
void kvp_host_read_early(int file, uint64_t first, size_t bytes);

/* Zeroes a part of reserved memory, and gives the whole pages in it back to the system. Before
 * the part is used again it has to be committed. */
void kvp_host_clear(void *at, size_t bytes);

/* As kvp_host_clear for memory of anybody. Pages with a file behind them stay. */
void kvp_host_clear_foreign(void *at, size_t bytes);

/* Bytes of reserved memory that are resident. */
size_t kvp_host_resident(const void *memory, size_t bytes);

/* Files. A path is a regular file or nothing. */
bool kvp_host_is_file(const char *path);
FILE *kvp_host_open(const char *path, bool appends); /* programs that start do not inherit it */
uint64_t kvp_host_file_bytes(FILE *file);

#define KVP_MOST_PATH 4200 /* longer than any path that a system opens */

/* `kvp_host_create` begins a file that shall take the place of `path`, under another name, which it
 * writes to `name`. A file of that name that a killed process left is overwritten. False when it
 * cannot be created, or when another process writes it. `kvp_host_finish` gives it its place in one
 * step, and closes it; if `keep` is false, it removes it. False unless the file is in its place. A
 * path that is no regular file is written in place. */
bool kvp_host_create(const char *path, char *name, size_t n, int *file);
bool kvp_host_finish(int file, const char *path, const char *name, bool keep);

/* A text that differs when the file has changed: its size and its time of change. */
void kvp_host_file_state(const char *path, char *text, size_t n);

/* Calls see() with the path of each file that the process has mapped, in the order of addresses. */
void kvp_host_mapped_files(void (*see)(void *context, const char *path), void *context);

/* Sends a line to the program that listens under this name; lost when none does. */
void kvp_host_send(const char *name, const char *line);
