/* host_windows.c - host.h for Windows 10 and newer. */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <psapi.h>

#include "host.h"

#include "../../src/base/os_windows.h"

#include <errno.h>
#include <io.h>
#include <stdlib.h>
#include <string.h>

void *kvp_host_library_of(const void *code)
{
    HMODULE library = NULL;

    GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS, (const wchar_t *)code, &library);
    return library;
}

void kvp_host_stay_loaded(void)
{
    HMODULE library;

    GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_PIN,
                       (const wchar_t *)(uintptr_t)&kvp_host_stay_loaded, &library);
}

/* Builds of llama.cpp with assertions are distributed for Windows (npm's). */
bool kvp_host_reserves_nominal_bytes(void)
{
    return true;
}

void *kvp_host_reserve(size_t bytes)
{
    return VirtualAlloc(NULL, bytes, MEM_RESERVE, PAGE_READWRITE);
}

/* Committed pages count against the system's limit, and are resident once they were written. */
bool kvp_host_commit(void *at, size_t bytes)
{
    return bytes == 0 || VirtualAlloc(at, bytes, MEM_COMMIT, PAGE_READWRITE) != NULL;
}

void kvp_host_release(void *memory, size_t bytes)
{
    (void)bytes;
    VirtualFree(memory, 0, MEM_RELEASE);
}

/* Windows gives large pages only to programs that ask for them. */
void kvp_host_refuse_huge_pages(void *memory, size_t bytes)
{
    (void)memory;
    (void)bytes;
}

static uintptr_t page_bytes(void)
{
    SYSTEM_INFO info;

    GetSystemInfo(&info);
    return info.dwPageSize;
}

/* Zeroes a part of a page, if the page is memory. */
static void clear_part(uintptr_t first, uintptr_t last)
{
    MEMORY_BASIC_INFORMATION about;

    if (first < last && VirtualQuery((void *)first, &about, sizeof(about)) != 0 &&
        about.State == MEM_COMMIT)
        memset((void *)first, 0, last - first);
}

void kvp_host_clear(void *at, size_t bytes)
{
    const uintptr_t page = page_bytes(), first = (uintptr_t)at, last = first + bytes;
    const uintptr_t inner_first = (first + page - 1) / page * page, inner_last = last / page * page;

    if (inner_first >= inner_last) {
        const uintptr_t next = inner_first < last ? inner_first : last;
        clear_part(first, next);
        clear_part(next, last);
        return;
    }
    clear_part(first, inner_first);
    clear_part(inner_last, last);
    VirtualFree((void *)inner_first, inner_last - inner_first, MEM_DECOMMIT);
}

void kvp_host_clear_foreign(void *at, size_t bytes)
{
    memset(at, 0, bytes);
}

size_t kvp_host_resident(const void *memory, size_t bytes)
{
    enum { AT_ONCE = 512 };
    PSAPI_WORKING_SET_EX_INFORMATION pages[AT_ONCE];
    const uintptr_t page = page_bytes(), base = (uintptr_t)memory;
    size_t resident = 0;

    for (size_t at = 0; at < bytes;) {
        DWORD n = 0;
        for (; n < AT_ONCE && at < bytes; at += page)
            pages[n++].VirtualAddress = (void *)(base + at);
        if (!K32QueryWorkingSetEx(GetCurrentProcess(), pages, n * sizeof(pages[0])))
            return resident;
        for (DWORD i = 0; i < n; i++)
            resident += pages[i].VirtualAttributes.Valid * page;
    }
    return resident;
}

bool kvp_host_is_file(const char *path)
{
    wchar_t wide[KVANT_OS_MAX_PATH];
    const DWORD kind =
        kvant_windows_path(path, wide) ? GetFileAttributesW(wide) : INVALID_FILE_ATTRIBUTES;

    return kind != INVALID_FILE_ATTRIBUTES &&
           (kind & (FILE_ATTRIBUTE_DIRECTORY | FILE_ATTRIBUTE_DEVICE)) == 0;
}

FILE *kvp_host_open(const char *path, bool appends)
{
    wchar_t wide[KVANT_OS_MAX_PATH];

    return kvant_windows_path(path, wide) ? _wfopen(wide, appends ? L"abN" : L"rbN") : NULL;
}

uint64_t kvp_host_file_bytes(FILE *file)
{
    const int64_t bytes = _filelengthi64(_fileno(file));

    return bytes > 0 ? (uint64_t)bytes : 0;
}

/* Only a plug-in that serves a program's states writes files, and this one serves none
 * (host_no_imports.c). */
bool kvp_host_create(const char *path, char *name, size_t n, int *file)
{
    (void)path;
    (void)name;
    (void)n;
    (void)file;
    errno = ENOSYS;
    return false;
}

bool kvp_host_finish(int file, const char *path, const char *name, bool keep)
{
    (void)file;
    (void)path;
    (void)name;
    (void)keep;
    errno = ENOSYS;
    return false;
}

void kvp_host_file_state(const char *path, char *text, size_t n)
{
    WIN32_FILE_ATTRIBUTE_DATA about = { 0 };
    wchar_t wide[KVANT_OS_MAX_PATH];

    if (kvant_windows_path(path, wide))
        GetFileAttributesExW(wide, GetFileExInfoStandard, &about);
    snprintf(text, n, "%lu %lu %lu %lu", about.nFileSizeHigh, about.nFileSizeLow,
             about.ftLastWriteTime.dwHighDateTime, about.ftLastWriteTime.dwLowDateTime);
}

/* Windows names a mapped file by its device: \Device\HarddiskVolume3\models\m.gguf. Puts the
 * drive's letter in place of the device. A device without a letter gets a name that opens it. */
static void name_drive(const wchar_t *device_path, wchar_t *path, size_t n)
{
    wchar_t drive[3] = L"A:", device[MAX_PATH];

    for (; drive[0] <= L'Z'; drive[0]++) {
        if (QueryDosDeviceW(drive, device, MAX_PATH) == 0)
            continue;
        const size_t length = wcslen(device);
        if (_wcsnicmp(device_path, device, length) == 0 && device_path[length] == L'\\') {
            swprintf(path, n, L"%ls%ls", drive, device_path + length);
            return;
        }
    }
    if (wcsncmp(device_path, L"\\??\\", 4) == 0)
        swprintf(path, n, L"%ls", device_path + 4);
    else
        swprintf(path, n, L"\\\\?\\GLOBALROOT%ls", device_path);
}

void kvp_host_mapped_files(void (*see)(void *context, const char *path), void *context)
{
    MEMORY_BASIC_INFORMATION about;
    wchar_t name[KVANT_OS_MAX_PATH], wide[KVANT_OS_MAX_PATH + 16];
    char path[KVANT_OS_MAX_PATH];
    const char *at = NULL;

    for (; VirtualQuery(at, &about, sizeof(about)) != 0;
         at = (const char *)about.BaseAddress + about.RegionSize) {
        if (about.State != MEM_COMMIT || about.Type != MEM_MAPPED ||
            K32GetMappedFileNameW(GetCurrentProcess(), about.BaseAddress, name,
                                  KVANT_OS_MAX_PATH) == 0)
            continue;
        name_drive(name, wide, sizeof(wide) / sizeof(wide[0]));
        if (kvant_windows_to_utf8(wide, path, sizeof(path)))
            see(context, path);
    }
}

/* `kvant exec` watches no program on Windows. */
void kvp_host_send(const char *name, const char *line)
{
    (void)name;
    (void)line;
}
