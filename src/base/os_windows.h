/* os_windows.h - what the files that know Windows share: names in UTF-16, and errno for the error
 * of a call of Windows. Only such files include it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <wchar.h>

/* A path in UTF-16, with a room of KVANT_OS_MAX_PATH. A path beyond 247 letters, which is the limit
 * of Windows, gets the form that has none. False with the reason in errno. */
bool kvant_windows_path(const char *path, wchar_t *wide);

/* A file's handle: a HANDLE. */
void *kvant_windows_handle(int file);

/* Opens a file with the access and the disposition of CreateFileW(). Other programs may do with the
 * file what POSIX allows. */
bool kvant_windows_open(const char *path, unsigned long access, unsigned long how, int *file);

/* Converts a text with its end. False with the reason in errno: it is malformed, or does not fit
 * into n elements. */
bool kvant_windows_to_utf16(const char *text, wchar_t *wide, size_t n);
bool kvant_windows_to_utf8(const wchar_t *wide, char *text, size_t n);

/* Sets errno to the last error of Windows; false. */
bool kvant_windows_failed(void);
