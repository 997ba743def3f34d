/* os.h - what the command needs of an operating system, in addition to files, libraries, threads
 * and variables (src/base/os.h): its own path, other programs, locks, disks, terminals. os_posix.c
 * has these functions for Linux and macOS, os_windows.c for Windows. No other file of the command
 * includes a header of a system or asks which system it is (tests/docs/test_os.py), except for
 * machine_linux.c and the files behind exec_watch.h and exec_scan.h.
 *
 * Paths are UTF-8. A function that returns false leaves the reason in errno. */
#pragma once

#include "../src/base/os.h"

#include <stdio.h>

#define OS_MAX_PATH KVANT_OS_MAX_PATH

/* The file of libkvant, seen from an installation's folder of libraries; the Python that runs its
 * package; libraries by which programs use GPUs that are not CUDA's. */
#if defined(_WIN32)
#define OS_LIBKVANT "../bin/libkvant.dll"
#define OS_PYTHON "python"
#define OS_GPU_LIBRARIES "vulkan-1.dll", "amdhip64.dll", "ze_loader.dll"
#elif defined(__APPLE__)
#define OS_LIBKVANT "libkvant.dylib"
#define OS_PYTHON "python3"
#define OS_GPU_LIBRARIES "/System/Library/Frameworks/Metal.framework/Metal"
#else
#define OS_LIBKVANT "libkvant.so"
#define OS_PYTHON "python3"
#define OS_GPU_LIBRARIES "libvulkan.so.1", "libamdhip64.so", "libze_loader.so.1"
#endif

/* Prepares the process. False after a line that says which system is needed. */
bool os_start(void);

/* This program's file, and the path of a file without links. */
bool os_own_path(char *path, size_t bytes);
bool os_resolve(const char *path, char *real, size_t bytes);

/* The file of the library that holds a function. */
bool os_library_of(const void *function, char *path, size_t bytes);

/* Whether a file name is one of the shared library `name`, whatever version it has in it. */
bool os_is_library(const char *file, const char *name);

/* Opens a library whose symbols later libraries may use. NULL: see kvant_os_library_error(). */
void *os_open_global(const char *path);

/* Sets a variable of the environment, or removes it if value is NULL. os_set_default() leaves a
 * variable that is set. */
bool os_set_variable(const char *name, const char *value);
bool os_set_default(const char *name, const char *value);

/* The file of a program: by its path, or by its name in the folders of PATH. */
bool os_find_program(const char *word, char *path, size_t bytes);

/* Whether a file with these first bytes is a program. Scripts are programs if they are wanted. */
bool os_is_program(const char head[4], bool scripts);

/* This process becomes the program, or ends with the program's exit status. Returns when it cannot
 * be started, with the reason in errno. words: the program, its arguments, NULL. */
void os_become(char *const *words);

/* Runs a program without input and error output. Reads its output to its end, or until text is full
 * or the time is over. Then it ends the program, with the programs that this one started.
 * variables: n words NAME=value, which are added to its environment. *late: the time was over. */
bool os_read_output(char *const *words, char *const *variables, int n, int seconds, char *text,
                    size_t bytes, bool *late);

/* Files to read and to write, for kvant_os_read_at() and the like. */
bool os_open_or_create(const char *path, int *file);
bool os_resize(int file, uint64_t bytes);
bool os_take_room(int file, uint64_t bytes); /* no later write to them finds the disk full */
void *os_map_to_write(int file, size_t bytes);

/* Locks the whole file until it is closed. EWOULDBLOCK: another process has locked it. */
bool os_lock(int file);

/* Folders and disks. A folder that exists is as good as a new one. */
bool os_make_folder(const char *path);
bool os_is_folder(const char *path);
bool os_can_write_to(const char *folder);
bool os_free_bytes(const char *folder, double *bytes);
double os_bytes_on_disk(const char *path); /* fewer than the file's size where it has holes */

/* Calls see() with the name of each file of a folder until it returns true. */
bool os_each_file(const char *folder, bool (*see)(void *context, const char *name), void *context);

/* A stream into memory. os_stream_text() closes it and returns the text with a 0 behind it, to be
 * freed; NULL where a write failed. *bytes, if wanted, becomes the length. */
typedef struct os_stream {
    FILE *file; /* NULL: closed, or there is no memory */
    char *text;
    size_t bytes;
} os_stream;

bool os_stream_open(os_stream *s);
char *os_stream_text(os_stream *s, size_t *bytes);

bool os_errors_on_terminal(void);

/* The number of idle CPUs among the CPUs that this process may use. It has a fraction for a CPU
 * that is busy for a part of the time. Watches them for a tenth of a second. Programs with a nice
 * value count, too: eight of nice value 5 left two threads that wait for each other 0.9 tokens/s.
 * HUGE_VAL when the system does not say. */
double os_idle_cpus(void);

/* The names of the system and of the machine, as uname -s and uname -m print them; "" for an
 * unknown one. */
void os_names(char *system, char *machine, size_t bytes);
