/* os.h - what libkvant needs of an operating system: files, pages of memory, libraries, processors
 * and threads. os_posix.c has these functions for Linux and macOS, os_windows.c for Windows. No
 * other file of src/ includes a header of a system or asks which system it is
 * (tests/docs/test_os.py). C11 and pthread.h are used directly, because compilers for every system
 * have both.
 *
 * Paths are UTF-8. A function that returns false leaves the reason in errno. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The longest path, with its end, that a function here makes or takes. */
#define KVANT_OS_MAX_PATH 4096u /* as PATH_MAX of Linux; Windows allows 32767 */

/* Files. A file is a number that kvant_os_close() gives back. */
bool kvant_os_open(const char *path, int *file);   /* to read */
bool kvant_os_create(const char *path, int *file); /* to read and write; EEXIST if path exists */
bool kvant_os_close(int file);
bool kvant_os_exists(const char *path);
bool kvant_os_is_special(const char *path); /* a device or a pipe, which a rename would replace */
bool kvant_os_remove(const char *path);

/* The size of a regular file. EINVAL: the file is not a regular one. */
bool kvant_os_size(int file, uint64_t *bytes);

/* All n bytes. EIO: the file ends before. The functions with a place leave undefined where the next
 * read or write without one takes place. */
bool kvant_os_read(int file, void *bytes, size_t n);
bool kvant_os_read_at(int file, void *bytes, size_t n, uint64_t at);
bool kvant_os_write(int file, const void *bytes, size_t n);
bool kvant_os_write_at(int file, const void *bytes, size_t n, uint64_t at);
bool kvant_os_flush(int file); /* to the disk */

/* Renames a file. A file that has the new name is replaced in one step. On Windows two steps are
 * needed while a process maps that file: between them no file has the new name. */
bool kvant_os_replace(const char *from, const char *to);

#define KVANT_OS_PART ".kvant-part"

/* Files that replace others. `kvant_os_begin` begins a file that shall take the place of `path`,
 * and writes its name to `name`: `path`, followed by KVANT_OS_PART. A file that a killed process
 * left under this name is overwritten. EBUSY: another process or thread writes it.
 * `kvant_os_finish` closes the file and gives it its place, or removes it if `keep` is false. False
 * unless the file is in its place. */
bool kvant_os_begin(const char *path, char *name, size_t n, int *file);
bool kvant_os_finish(int file, const char *path, const char *name, bool keep);

/* The name at the end of a path, and whether a path begins at a root. */
const char *kvant_os_file_name(const char *path);
bool kvant_os_is_absolute(const char *path);

/* The value of a variable of the environment; NULL when it is not set. The text stays as it is
 * until the variable is set again. */
const char *kvant_os_variable(const char *name);

/* A number that no other running process has, for names of temporary files. */
uint64_t kvant_os_process(void);

/* Pages. A mapping of a file is read-only and outlives the closed file; new memory is zeroed. NULL:
 * there is no memory, or n is 0. */
const void *kvant_os_map_file(int file, size_t n);
void *kvant_os_map_memory(size_t n);
void kvant_os_unmap(const void *memory, size_t n);

/* Bytes of the machine's memory, and of the part that programs may take without swapping; 0 when
 * the system does not say. */
void kvant_os_memory(size_t *available, size_t *total);

/* Memory that is aligned to a power of two and freed by kvant_os_free(). n is a multiple of it. */
void *kvant_os_alloc(size_t alignment, size_t n);
void kvant_os_free(void *memory);

/* Shared libraries. NULL: kvant_os_library_error() says why until the thread's next call. */
void *kvant_os_open_library(const char *file);

/* A function of the library, or of the libraries that it needs. NULL: none has it. */
void *kvant_os_symbol(void *library, const char *name);
void kvant_os_close_library(void *library);
const char *kvant_os_library_error(void);

/* The file name of a shared library that is loaded at run time, and of the NVIDIA driver's. */
#if defined(_WIN32)
#define KVANT_OS_LIBRARY(name) name ".dll"
#define KVANT_OS_CUDA_DRIVER "nvcuda.dll"
#else
#define KVANT_OS_LIBRARY(name) "lib" name ".so"
#define KVANT_OS_CUDA_DRIVER "libcuda.so.1"
#endif

/* Processors that the calling thread may run on, at least 1. */
uint32_t kvant_os_processors(void);

/* Whether a 64-bit ARM processor has the instructions for dot products; false on other machines. */
bool kvant_os_has_arm_dot_product(void);

/* Starts a thread with a stack of this size, or of the usual size if stack is 0. It takes no signal
 * except those of its own faults. thread is NULL: nobody joins it. */
bool kvant_os_start_thread(pthread_t *thread, void *(*body)(void *), void *argument, size_t stack);

/* Lets another thread run that waits for this core. */
void kvant_os_yield(void);

/* The child of a fork() calls this function before fork() returns in it. Nothing happens on a
 * system that cannot fork. */
void kvant_os_after_fork(void (*in_child)(void));
