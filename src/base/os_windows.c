/* os_windows.c - os.h for Windows 10 and newer. A file's number is its handle: Windows promises
 * that 32 bits of a handle are enough. */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include "os.h"
#include "os_windows.h"

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHORT_PATH 247u                /* the longest name of a folder without another form */
#define MOST_AT_ONCE ((size_t)1 << 30) /* bytes of a call; it counts with 32 bits */
#define LONG_FORM L"\\\\?\\"           /* Windows takes such a path as it stands */
#define LONG_FORM_LENGTH 4u            /* without its end */

bool kvant_windows_failed(void)
{
    static const struct {
        DWORD windows;
        int posix;
    } codes[] = {
        { ERROR_FILE_NOT_FOUND, ENOENT },
        { ERROR_PATH_NOT_FOUND, ENOENT },
        { ERROR_INVALID_NAME, ENOENT },
        { ERROR_BAD_NETPATH, ENOENT },
        { ERROR_ACCESS_DENIED, EACCES },
        { ERROR_SHARING_VIOLATION, EACCES },
        { ERROR_LOCK_VIOLATION, EACCES },
        { ERROR_USER_MAPPED_FILE, EACCES },
        { ERROR_WRITE_PROTECT, EROFS },
        { ERROR_FILE_EXISTS, EEXIST },
        { ERROR_ALREADY_EXISTS, EEXIST },
        { ERROR_DISK_FULL, ENOSPC },
        { ERROR_HANDLE_DISK_FULL, ENOSPC },
        { ERROR_NOT_ENOUGH_MEMORY, ENOMEM },
        { ERROR_OUTOFMEMORY, ENOMEM },
        { ERROR_COMMITMENT_LIMIT, ENOMEM },
        { ERROR_INVALID_HANDLE, EBADF },
        { ERROR_INVALID_PARAMETER, EINVAL },
        { ERROR_FILENAME_EXCED_RANGE, ENAMETOOLONG },
    };
    const DWORD code = GetLastError();
    errno = EIO;
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i].windows == code)
            errno = codes[i].posix;
    return false;
}

static bool conversion_failed(void)
{
    errno = GetLastError() == ERROR_INSUFFICIENT_BUFFER ? ENAMETOOLONG : EILSEQ;
    return false;
}

bool kvant_windows_to_utf16(const char *text, wchar_t *wide, size_t n)
{
    return MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, text, -1, wide, (int)n) > 0 ||
           conversion_failed();
}

bool kvant_windows_to_utf8(const wchar_t *wide, char *text, size_t n)
{
    return WideCharToMultiByte(CP_UTF8, WC_ERR_INVALID_CHARS, wide, -1, text, (int)n, NULL, NULL) >
               0 ||
           conversion_failed();
}

bool kvant_windows_path(const char *path, wchar_t *wide)
{
    wchar_t full[KVANT_OS_MAX_PATH];
    if (!kvant_windows_to_utf16(path, wide, KVANT_OS_MAX_PATH))
        return false;
    if (wcslen(wide) <= SHORT_PATH || wcsncmp(wide, L"\\\\", 2) == 0)
        return true;
    const DWORD n = GetFullPathNameW(wide, KVANT_OS_MAX_PATH, full, NULL);
    if (n == 0)
        return kvant_windows_failed();
    if (n + LONG_FORM_LENGTH >= KVANT_OS_MAX_PATH) {
        errno = ENAMETOOLONG;
        return false;
    }
    wcscpy(wide, LONG_FORM);
    wcscpy(wide + LONG_FORM_LENGTH, full);
    return true;
}

HANDLE kvant_windows_handle(int file)
{
    return (HANDLE)(intptr_t)file;
}

bool kvant_windows_open(const char *path, DWORD access, DWORD how, int *file)
{
    wchar_t wide[KVANT_OS_MAX_PATH];
    const DWORD share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    *file = -1;
    if (!kvant_windows_path(path, wide))
        return false;
    const HANDLE handle = CreateFileW(wide, access, share, NULL, how, FILE_ATTRIBUTE_NORMAL, NULL);
    *file = (int)(intptr_t)handle; /* -1 is INVALID_HANDLE_VALUE */
    return handle != INVALID_HANDLE_VALUE || kvant_windows_failed();
}

bool kvant_os_open(const char *path, int *file)
{
    return kvant_windows_open(path, GENERIC_READ, OPEN_EXISTING, file);
}

bool kvant_os_create(const char *path, int *file)
{
    return kvant_windows_open(path, GENERIC_READ | GENERIC_WRITE, CREATE_NEW, file);
}

bool kvant_os_close(int file)
{
    return CloseHandle(kvant_windows_handle(file)) || kvant_windows_failed();
}

bool kvant_os_exists(const char *path)
{
    wchar_t wide[KVANT_OS_MAX_PATH];
    return kvant_windows_path(path, wide) &&
           (GetFileAttributesW(wide) != INVALID_FILE_ATTRIBUTES || kvant_windows_failed());
}

bool kvant_os_is_special(const char *path)
{
    (void)path; /* a name of a device is one in every folder, and cannot be replaced */
    return false;
}

bool kvant_os_remove(const char *path)
{
    wchar_t wide[KVANT_OS_MAX_PATH];
    return kvant_windows_path(path, wide) && (DeleteFileW(wide) || kvant_windows_failed());
}

bool kvant_os_size(int file, uint64_t *bytes)
{
    LARGE_INTEGER size;
    if (GetFileType(kvant_windows_handle(file)) != FILE_TYPE_DISK) {
        errno = EINVAL;
        return false;
    }
    if (!GetFileSizeEx(kvant_windows_handle(file), &size))
        return kvant_windows_failed();
    *bytes = (uint64_t)size.QuadPart;
    return true;
}

/* Reads or writes n bytes, from *at on or from the file's own position on. */
static bool move_all(int file, void *bytes, size_t n, const uint64_t *at, bool writes)
{
    uint64_t offset = at ? *at : 0;
    for (char *next = bytes; n > 0;) {
        OVERLAPPED place = { .Offset = (DWORD)offset, .OffsetHigh = (DWORD)(offset >> 32) };
        const DWORD most = (DWORD)(n < MOST_AT_ONCE ? n : MOST_AT_ONCE);
        DWORD done = 0;
        const BOOL ok =
            writes ? WriteFile(kvant_windows_handle(file), next, most, &done, at ? &place : NULL)
                   : ReadFile(kvant_windows_handle(file), next, most, &done, at ? &place : NULL);
        if (!ok)
            return kvant_windows_failed();
        if (done == 0) {
            errno = EIO;
            return false;
        }
        next += done;
        n -= done;
        offset += done;
    }
    return true;
}

bool kvant_os_read(int file, void *bytes, size_t n)
{
    return move_all(file, bytes, n, NULL, false);
}

bool kvant_os_read_at(int file, void *bytes, size_t n, uint64_t at)
{
    return move_all(file, bytes, n, &at, false);
}

bool kvant_os_write(int file, const void *bytes, size_t n)
{
    return move_all(file, (void *)(uintptr_t)bytes, n, NULL, true);
}

bool kvant_os_write_at(int file, const void *bytes, size_t n, uint64_t at)
{
    return move_all(file, (void *)(uintptr_t)bytes, n, &at, true);
}

bool kvant_os_flush(int file)
{
    return FlushFileBuffers(kvant_windows_handle(file)) || kvant_windows_failed();
}

/* Names of replaced files that a mapping of this process kept from being deleted. Each unmapping
 * tries to delete them. One that another process maps, or that is beyond this list, stays with the
 * name *.old. */
enum { MOST_OLD = 16 };
static struct {
    pthread_mutex_t mutex;
    wchar_t *paths[MOST_OLD];
} old_files = { .mutex = PTHREAD_MUTEX_INITIALIZER };

static void delete_old_files(wchar_t *added)
{
    pthread_mutex_lock(&old_files.mutex);
    for (size_t i = 0; i < MOST_OLD; i++) {
        if (!old_files.paths[i]) {
            old_files.paths[i] = added;
            added = NULL;
        }
        if (old_files.paths[i] &&
            (DeleteFileW(old_files.paths[i]) || GetLastError() == ERROR_FILE_NOT_FOUND)) {
            free(old_files.paths[i]);
            old_files.paths[i] = NULL;
        }
    }
    pthread_mutex_unlock(&old_files.mutex);
    free(added);
}

/* A file that is mapped cannot be replaced, but it can get another name. */
static bool replace_mapped(const wchar_t *from, const wchar_t *to)
{
    wchar_t old[KVANT_OS_MAX_PATH];
    static volatile LONG count;
    const int n = swprintf(old, KVANT_OS_MAX_PATH, L"%ls.%lu-%ld.old", to,
                           (unsigned long)GetCurrentProcessId(), InterlockedIncrement(&count));
    if (n < 0 || (size_t)n >= KVANT_OS_MAX_PATH) {
        errno = ENAMETOOLONG;
        return false;
    }
    if (!MoveFileExW(to, old, 0))
        return kvant_windows_failed();
    if (!MoveFileExW(from, to, MOVEFILE_WRITE_THROUGH)) {
        kvant_windows_failed();
        MoveFileExW(old, to, 0);
        return false;
    }
    delete_old_files(wcsdup(old)); /* without memory it stays */
    return true;
}

bool kvant_os_replace(const char *from, const char *to)
{
    wchar_t wide_from[KVANT_OS_MAX_PATH], wide_to[KVANT_OS_MAX_PATH];
    if (!kvant_windows_path(from, wide_from) || !kvant_windows_path(to, wide_to))
        return false;
    if (MoveFileExW(wide_from, wide_to, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH))
        return true;
    const DWORD code = GetLastError(), attributes = GetFileAttributesW(wide_to);
    if ((code == ERROR_ACCESS_DENIED || code == ERROR_SHARING_VIOLATION ||
         code == ERROR_USER_MAPPED_FILE) &&
        attributes != INVALID_FILE_ATTRIBUTES &&
        !(attributes & (FILE_ATTRIBUTE_DIRECTORY | FILE_ATTRIBUTE_READONLY)))
        return replace_mapped(wide_from, wide_to);
    SetLastError(code);
    return kvant_windows_failed();
}

/* No other process opens the file while it is open. */
bool kvant_os_begin(const char *path, char *name, size_t n, int *file)
{
    wchar_t wide[KVANT_OS_MAX_PATH];
    const int length = snprintf(name, n, "%s" KVANT_OS_PART, path);
    *file = -1;
    errno = ENAMETOOLONG;
    if (length < 0 || (size_t)length >= n || !kvant_windows_path(name, wide))
        return false;
    const HANDLE handle = CreateFileW(wide, GENERIC_READ | GENERIC_WRITE, 0, NULL, CREATE_ALWAYS,
                                      FILE_ATTRIBUTE_NORMAL, NULL);
    *file = (int)(intptr_t)handle; /* -1 is INVALID_HANDLE_VALUE */
    if (handle != INVALID_HANDLE_VALUE)
        return true;
    const bool busy = GetLastError() == ERROR_SHARING_VIOLATION;
    kvant_windows_failed();
    errno = busy ? EBUSY : errno;
    return false;
}

/* An open file cannot be renamed. */
bool kvant_os_finish(int file, const char *path, const char *name, bool keep)
{
    const bool done = kvant_os_close(file) && keep && kvant_os_replace(name, path);
    const int error = errno;
    if (!done)
        kvant_os_remove(name);
    errno = error;
    return done;
}

const char *kvant_os_file_name(const char *path)
{
    for (const char *at = path; *at; at++)
        if (*at == '/' || *at == '\\' || *at == ':')
            path = at + 1;
    return path;
}

/* C:\ and \\server\share, and \ at the root of the current drive. */
bool kvant_os_is_absolute(const char *path)
{
    return path[0] == '/' || path[0] == '\\' || (path[0] && path[1] == ':');
}

/* Returns a text that stays. Texts are few, so each one is kept once. NULL without memory. */
static const char *keep(const char *text)
{
    static struct kept {
        struct kept *next;
        char text[];
    } *all;
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&mutex);
    struct kept *found = all;
    while (found && strcmp(found->text, text) != 0)
        found = found->next;
    if (!found) {
        found = malloc(sizeof *found + strlen(text) + 1);
        if (found) {
            strcpy(found->text, text);
            found->next = all;
            all = found;
        }
    }
    pthread_mutex_unlock(&mutex);
    return found ? found->text : NULL;
}

const char *kvant_os_variable(const char *name)
{
    wchar_t wide[KVANT_OS_MAX_PATH], wide_name[128];
    char value[KVANT_OS_MAX_PATH];
    if (!kvant_windows_to_utf16(name, wide_name, sizeof wide_name / sizeof *wide_name))
        return NULL;
    SetLastError(ERROR_SUCCESS);
    const DWORD n = GetEnvironmentVariableW(wide_name, wide, KVANT_OS_MAX_PATH);
    if (n == 0 && GetLastError() != ERROR_SUCCESS)
        return NULL;
    wide[n < KVANT_OS_MAX_PATH ? n : 0] = 0;
    if (n >= KVANT_OS_MAX_PATH || !kvant_windows_to_utf8(wide, value, sizeof value))
        return "(a value that is not UTF-16, or is longer than 4095 bytes)";
    return keep(value);
}

uint64_t kvant_os_process(void)
{
    return GetCurrentProcessId();
}

const void *kvant_os_map_file(int file, size_t n)
{
    const HANDLE mapping =
        CreateFileMappingW(kvant_windows_handle(file), NULL, PAGE_READONLY, 0, 0, NULL);
    const void *memory = mapping && n > 0 ? MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, n) : NULL;
    if (!memory)
        kvant_windows_failed();
    if (mapping)
        CloseHandle(mapping); /* the view keeps it */
    return memory;
}

void *kvant_os_map_memory(size_t n)
{
    void *memory = VirtualAlloc(NULL, n, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (!memory)
        kvant_windows_failed();
    return memory;
}

void kvant_os_unmap(const void *memory, size_t n)
{
    (void)n; /* Windows unmaps a mapping as a whole */
    if (UnmapViewOfFile(memory))
        delete_old_files(NULL);
    else
        VirtualFree((void *)(uintptr_t)memory, 0, MEM_RELEASE);
}

void kvant_os_memory(size_t *available, size_t *total)
{
    MEMORYSTATUSEX memory = { .dwLength = sizeof memory };
    const bool known = GlobalMemoryStatusEx(&memory);
    *available = known ? (size_t)memory.ullAvailPhys : 0;
    *total = known ? (size_t)memory.ullTotalPhys : 0;
}

void *kvant_os_alloc(size_t alignment, size_t n)
{
    return _aligned_malloc(n, alignment);
}

void kvant_os_free(void *memory)
{
    _aligned_free(memory);
}

static _Thread_local char library_error[512];

void *kvant_os_open_library(const char *file)
{
    wchar_t wide[KVANT_OS_MAX_PATH], reason[256] = L"";
    char text[256] = "";
    if (!kvant_windows_path(file, wide)) {
        snprintf(library_error, sizeof library_error, "%.200s: %s", file, strerror(errno));
        return NULL;
    }
    /* Libraries in its folder are found, too, if the path is absolute and has no slashes. */
    for (wchar_t *at = wide; *at; at++)
        *at = *at == L'/' ? L'\\' : *at;
    const DWORD how = kvant_os_is_absolute(file) ? LOAD_WITH_ALTERED_SEARCH_PATH : 0;
    const HMODULE library = LoadLibraryExW(wide, NULL, how);
    if (library)
        return library;
    const DWORD code = GetLastError();
    const DWORD n = FormatMessageW(FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS |
                                       FORMAT_MESSAGE_MAX_WIDTH_MASK,
                                   NULL, code, 0, reason, sizeof reason / sizeof *reason, NULL);
    if (n == 0 || !kvant_windows_to_utf8(reason, text, sizeof text))
        snprintf(text, sizeof text, "error %lu of Windows", (unsigned long)code);
    snprintf(library_error, sizeof library_error, "%.200s: %s", file, text);
    return NULL;
}

/* Looks into the modules that a module imports from, so deep. */
static FARPROC find_symbol(HMODULE module, const char *name, int depth)
{
    const char *base = (const char *)module;
    const FARPROC found = GetProcAddress(module, name);
    if (found || depth == 0)
        return found;
    const IMAGE_NT_HEADERS *head =
        (const void *)(base + ((const IMAGE_DOS_HEADER *)(const void *)base)->e_lfanew);
    const DWORD imports =
        head->OptionalHeader.DataDirectory[IMAGE_DIRECTORY_ENTRY_IMPORT].VirtualAddress;
    const IMAGE_IMPORT_DESCRIPTOR *next = (const void *)(base + imports);
    for (; imports != 0 && next->Name != 0; next++) {
        const HMODULE needed = GetModuleHandleA(base + next->Name);
        const FARPROC at = needed ? find_symbol(needed, name, depth - 1) : NULL;
        if (at)
            return at;
    }
    return NULL;
}

void *kvant_os_symbol(void *library, const char *name)
{
    return (void *)(uintptr_t)find_symbol(library, name,
                                          2); /* llama.dll, ggml.dll, ggml-base.dll */
}

void kvant_os_close_library(void *library)
{
    FreeLibrary(library);
}

const char *kvant_os_library_error(void)
{
    return library_error[0] ? library_error : "unknown reason";
}

/* Counts the processors of the process's group, which has at most 64. */
uint32_t kvant_os_processors(void)
{
    DWORD_PTR own = 0, all = 0;
    uint32_t n = 0;
    if (!GetProcessAffinityMask(GetCurrentProcess(), &own, &all))
        return 1;
    for (; own; own &= own - 1)
        n++;
    return n > 0 ? n : 1;
}

bool kvant_os_has_arm_dot_product(void)
{
    return IsProcessorFeaturePresent(43); /* PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE */
}

/* The threads of a library run its code until the process ends, so it must stay loaded. */
static void pin_this_library(void)
{
    HMODULE library;
    GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_PIN,
                       (const wchar_t *)(uintptr_t)&pin_this_library, &library);
}

bool kvant_os_start_thread(pthread_t *thread, void *(*body)(void *), void *argument, size_t stack)
{
    pthread_attr_t attributes;
    pthread_t detached;
    if (pthread_attr_init(&attributes) != 0)
        return false;
    if (stack > 0)
        pthread_attr_setstacksize(&attributes, stack);
    if (!thread)
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pin_this_library();
    const int reason = pthread_create(thread ? thread : &detached, &attributes, body, argument);
    pthread_attr_destroy(&attributes);
    errno = reason;
    return reason == 0;
}

void kvant_os_yield(void)
{
    SwitchToThread();
}

void kvant_os_after_fork(void (*in_child)(void))
{
    (void)in_child; /* Windows cannot fork */
}
