/* os_windows.c - os.h for Windows 10, version 1903 and newer. kvant.rc makes UTF-8 the code page of
 * this program, so that the C library takes and gives texts in UTF-8: arguments, variables, paths
 * of fopen(). */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include "os.h"

#include "../src/base/os_windows.h"
#include "command.h"

#include <errno.h>
#include <fcntl.h>
#include <io.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

bool os_start(void)
{
    SetConsoleOutputCP(CP_UTF8);
    /* Results are the same bytes as on other systems, with no CR at the end of a line. */
    _setmode(_fileno(stdout), _O_BINARY);
    _setmode(_fileno(stdin), _O_BINARY);
    _set_fmode(_O_BINARY);
    return GetACP() == CP_UTF8 || complain("kvant needs Windows 10, version 1903 or newer");
}

/* Slashes are what the rest of the command looks for, and Windows reads them. */
static bool to_path(const wchar_t *wide, char *path, size_t bytes)
{
    if (wcsncmp(wide, L"\\\\?\\", 4) == 0 && wcsncmp(wide + 4, L"UNC\\", 4) != 0)
        wide += 4;
    if (!kvant_windows_to_utf8(wide, path, bytes))
        return false;
    for (char *at = path; *at != 0; at++)
        *at = *at == '\\' ? '/' : *at;
    return true;
}

static bool module_path(HMODULE module, char *path, size_t bytes)
{
    wchar_t wide[OS_MAX_PATH];
    const DWORD n = GetModuleFileNameW(module, wide, OS_MAX_PATH);
    if (n == 0)
        return kvant_windows_failed();
    if (n == OS_MAX_PATH) {
        errno = ENAMETOOLONG;
        return false;
    }
    return to_path(wide, path, bytes);
}

bool os_own_path(char *path, size_t bytes)
{
    return module_path(NULL, path, bytes);
}

bool os_library_of(const void *function, char *path, size_t bytes)
{
    HMODULE module;
    const DWORD how =
        GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    if (!GetModuleHandleExW(how, (const wchar_t *)function, &module))
        return kvant_windows_failed();
    return module_path(module, path, bytes);
}

bool os_resolve(const char *path, char *real, size_t bytes)
{
    wchar_t wide[OS_MAX_PATH], full[OS_MAX_PATH];
    if (!kvant_windows_path(path, wide))
        return false;
    const DWORD share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    const HANDLE file = CreateFileW(wide, FILE_READ_ATTRIBUTES, share, NULL, OPEN_EXISTING,
                                    FILE_FLAG_BACKUP_SEMANTICS, NULL); /* folders, too */
    if (file == INVALID_HANDLE_VALUE)
        return kvant_windows_failed();
    const DWORD n = GetFinalPathNameByHandleW(file, full, OS_MAX_PATH, VOLUME_NAME_DOS);
    const bool ok = n > 0 && n < OS_MAX_PATH ? to_path(full, real, bytes) : kvant_windows_failed();
    CloseHandle(file);
    return ok;
}

/* NAME.dll and NAME.v0.5.0.dll. */
bool os_is_library(const char *file, const char *name)
{
    const size_t n = strlen(name), length = strlen(file);
    return length > n + 4 && _strnicmp(file, name, n) == 0 && file[n] == '.' &&
           _stricmp(file + length - 4, ".dll") == 0;
}

/* Libraries that are loaded later find this one, because it has a name in the process. */
void *os_open_global(const char *path)
{
    char real[OS_MAX_PATH];
    return kvant_os_open_library(os_resolve(path, real, sizeof real) ? real : path);
}

bool os_set_variable(const char *name, const char *value)
{
    errno = _putenv_s(name, value != NULL ? value : "");
    return errno == 0;
}

bool os_set_default(const char *name, const char *value)
{
    return getenv(name) != NULL || os_set_variable(name, value);
}

bool os_find_program(const char *word, char *path, size_t bytes)
{
    wchar_t name[OS_MAX_PATH], found[OS_MAX_PATH];
    if (!kvant_windows_path(word, name))
        return false;
    const DWORD n = SearchPathW(NULL, name, L".exe", OS_MAX_PATH, found, NULL);
    const DWORD kind =
        n > 0 && n < OS_MAX_PATH ? GetFileAttributesW(found) : INVALID_FILE_ATTRIBUTES;
    if (kind == INVALID_FILE_ATTRIBUTES || (kind & FILE_ATTRIBUTE_DIRECTORY) != 0) {
        errno = ENOENT;
        return false;
    }
    return to_path(found, path, bytes);
}

bool os_is_program(const char head[4], bool scripts)
{
    (void)scripts; /* Windows starts no file as a script */
    return memcmp(head, "MZ", 2) == 0;
}

/* Puts a word into quotes as the C library of Windows reads them: backslashes are doubled where a
 * quote follows. Returns the end. */
static char *quote(char *to, const char *word)
{
    size_t slashes = 0;
    *to++ = '"';
    for (; *word != 0; word++) {
        if (*word == '"')
            for (slashes++; slashes > 0; slashes--)
                *to++ = '\\';
        slashes = *word == '\\' ? slashes + 1 : 0;
        *to++ = *word;
    }
    for (; slashes > 0; slashes--)
        *to++ = '\\';
    *to++ = '"';
    return to;
}

/* The command line of words, in UTF-16; to be freed. */
static wchar_t *command_line(char *const *words)
{
    size_t bytes = 1;
    for (size_t i = 0; words[i] != NULL; i++)
        bytes += 2 * strlen(words[i]) + 3;
    char *line = malloc(bytes), *end = line;
    wchar_t *wide = calloc(bytes, sizeof *wide);
    for (size_t i = 0; line != NULL && words[i] != NULL; i++) {
        if (i > 0)
            *end++ = ' ';
        end = quote(end, words[i]);
    }
    if (line == NULL || wide == NULL) {
        free(wide);
        wide = NULL;
        errno = ENOMEM;
    } else {
        *end = 0;
        if (!kvant_windows_to_utf16(line, wide, bytes)) {
            free(wide);
            wide = NULL;
        }
    }
    free(line);
    return wide;
}

/* Starts a program in a job that ends with this process, so that it does not go on alone. */
static bool start(char *const *words, STARTUPINFOW *how, HANDLE *job, HANDLE *process)
{
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION limit = { .BasicLimitInformation.LimitFlags =
                                                       JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE };
    PROCESS_INFORMATION made;
    char path[OS_MAX_PATH];
    wchar_t wide[OS_MAX_PATH];
    if (!os_find_program(words[0], path, sizeof path) || !kvant_windows_path(path, wide))
        return false;
    wchar_t *line = command_line(words);
    if (line == NULL)
        return false;
    how->cb = sizeof *how;
    const bool ok =
        CreateProcessW(wide, line, NULL, NULL, TRUE, CREATE_SUSPENDED, NULL, NULL, how, &made) ||
        kvant_windows_failed();
    free(line);
    if (!ok)
        return false;
    *job = CreateJobObjectW(NULL, NULL);
    SetInformationJobObject(*job, JobObjectExtendedLimitInformation, &limit, sizeof limit);
    AssignProcessToJobObject(*job, made.hProcess);
    ResumeThread(made.hThread);
    CloseHandle(made.hThread);
    *process = made.hProcess;
    return true;
}

static BOOL WINAPI leave_to_program(DWORD event)
{
    return event == CTRL_C_EVENT || event == CTRL_BREAK_EVENT;
}

/* Windows cannot put another program into this process. So this one waits, leaves Ctrl-C to the
 * program, and ends as it ended. The program does not inherit a handler, as it would inherit that
 * Ctrl-C is ignored. */
void os_become(char *const *words)
{
    STARTUPINFOW how = { .cb = 0 };
    HANDLE job, process;
    DWORD code = 1;
    fflush(NULL);
    SetConsoleCtrlHandler(leave_to_program, TRUE);
    if (!start(words, &how, &job, &process)) {
        SetConsoleCtrlHandler(leave_to_program, FALSE);
        return;
    }
    WaitForSingleObject(process, INFINITE);
    GetExitCodeProcess(process, &code);
    ExitProcess(code);
}

typedef struct output {
    HANDLE from;
    char *text;
    size_t bytes;
} output;

static DWORD WINAPI read_output(void *user)
{
    output *o = user;
    DWORD got = 1;
    for (size_t n = 0; got > 0 && n < o->bytes; n += got) {
        if (!ReadFile(o->from, o->text + n, (DWORD)(o->bytes - n), &got, NULL))
            got = 0;
        o->text[n + got] = 0;
    }
    return 0;
}

/* Reads in a thread, because a pipe has no time limit. */
static bool read_in_time(const output *o, HANDLE process, HANDLE job, int seconds)
{
    const HANDLE reader = CreateThread(NULL, 0, read_output, (void *)(uintptr_t)o, 0, NULL);
    const bool in_time =
        reader != NULL && WaitForSingleObject(reader, (DWORD)seconds * 1000) == WAIT_OBJECT_0;
    TerminateJobObject(job, 1); /* the ends of the pipe are closed then */
    TerminateProcess(process, 1);
    if (reader != NULL) {
        WaitForSingleObject(reader, INFINITE);
        CloseHandle(reader);
    }
    CloseHandle(job);
    CloseHandle(process);
    return in_time;
}

bool os_read_output(char *const *words, char *const *variables, int n, int seconds, char *text,
                    size_t bytes, bool *late)
{
    SECURITY_ATTRIBUTES inherited = { .nLength = sizeof inherited, .bInheritHandle = TRUE };
    HANDLE from, to, job, process;
    text[0] = 0;
    *late = false;
    for (int i = 0; i < n; i++)
        _putenv(variables[i]); /* they stay: this process starts only the same program again */
    if (!CreatePipe(&from, &to, &inherited, 0))
        return kvant_windows_failed();
    SetHandleInformation(from, HANDLE_FLAG_INHERIT, 0);
    const HANDLE nothing =
        CreateFileW(L"NUL", GENERIC_READ | GENERIC_WRITE, 0, &inherited, OPEN_EXISTING, 0, NULL);
    STARTUPINFOW how = { .dwFlags = STARTF_USESTDHANDLES,
                         .hStdInput = nothing,
                         .hStdOutput = to,
                         .hStdError = nothing };
    const bool started = start(words, &how, &job, &process);
    CloseHandle(to);
    CloseHandle(nothing);
    const output o = { from, text, bytes - 1 };
    if (started)
        *late = !read_in_time(&o, process, job, seconds);
    CloseHandle(from);
    return started;
}

bool os_open_or_create(const char *path, int *file)
{
    return kvant_windows_open(path, GENERIC_READ | GENERIC_WRITE, OPEN_ALWAYS, file);
}

bool os_resize(int file, uint64_t bytes)
{
    const LARGE_INTEGER end = { .QuadPart = (LONGLONG)bytes };
    return (SetFilePointerEx(kvant_windows_handle(file), end, NULL, FILE_BEGIN) &&
            SetEndOfFile(kvant_windows_handle(file))) ||
           kvant_windows_failed();
}

/* A file of Windows has no holes unless it is asked for. */
bool os_take_room(int file, uint64_t bytes)
{
    return os_resize(file, bytes);
}

void *os_map_to_write(int file, size_t bytes)
{
    const HANDLE mapping =
        CreateFileMappingW(kvant_windows_handle(file), NULL, PAGE_READWRITE, 0, 0, NULL);
    void *memory =
        mapping != NULL && bytes > 0 ? MapViewOfFile(mapping, FILE_MAP_WRITE, 0, 0, bytes) : NULL;
    if (memory == NULL)
        kvant_windows_failed();
    if (mapping != NULL)
        CloseHandle(mapping);
    return memory;
}

/* A byte beyond every end stands for the file: locked bytes could not be read by others. */
bool os_lock(int file)
{
    OVERLAPPED place = { .OffsetHigh = 0x7fffffff };
    if (LockFileEx(kvant_windows_handle(file), LOCKFILE_EXCLUSIVE_LOCK | LOCKFILE_FAIL_IMMEDIATELY,
                   0, 1, 0, &place))
        return true;
    const bool locked = GetLastError() == ERROR_LOCK_VIOLATION;
    kvant_windows_failed();
    errno = locked ? EWOULDBLOCK : errno;
    return false;
}

bool os_make_folder(const char *path)
{
    wchar_t wide[OS_MAX_PATH];
    return kvant_windows_path(path, wide) &&
           (CreateDirectoryW(wide, NULL) || GetLastError() == ERROR_ALREADY_EXISTS ||
            kvant_windows_failed());
}

bool os_is_folder(const char *path)
{
    wchar_t wide[OS_MAX_PATH];
    const DWORD found =
        kvant_windows_path(path, wide) ? GetFileAttributesW(wide) : INVALID_FILE_ATTRIBUTES;
    return found != INVALID_FILE_ATTRIBUTES && found & FILE_ATTRIBUTE_DIRECTORY;
}

/* Rights have many sources on Windows, so a file is created that is deleted when it is closed. */
bool os_can_write_to(const char *folder)
{
    wchar_t wide[OS_MAX_PATH], name[MAX_PATH];
    if (!kvant_windows_path(folder, wide))
        return false;
    if (GetTempFileNameW(wide, L"kv", 0, name) == 0)
        return kvant_windows_failed();
    DeleteFileW(name);
    return true;
}

bool os_free_bytes(const char *folder, double *bytes)
{
    wchar_t wide[OS_MAX_PATH];
    ULARGE_INTEGER left;
    if (!kvant_windows_path(folder, wide))
        return false;
    if (!GetDiskFreeSpaceExW(wide, &left, NULL, NULL))
        return kvant_windows_failed();
    *bytes = (double)left.QuadPart;
    return true;
}

double os_bytes_on_disk(const char *path)
{
    wchar_t wide[OS_MAX_PATH];
    DWORD high = 0;
    const DWORD low =
        kvant_windows_path(path, wide) ? GetCompressedFileSizeW(wide, &high) : INVALID_FILE_SIZE;
    return low == INVALID_FILE_SIZE ? 0 : (double)((uint64_t)high << 32 | low);
}

bool os_each_file(const char *folder, bool (*see)(void *context, const char *name), void *context)
{
    char pattern[OS_MAX_PATH], name[OS_MAX_PATH];
    wchar_t wide[OS_MAX_PATH];
    WIN32_FIND_DATAW found;
    if (snprintf(pattern, sizeof pattern, "%s/*", folder) >= (int)sizeof pattern) {
        errno = ENAMETOOLONG;
        return false;
    }
    if (!kvant_windows_path(pattern, wide))
        return false;
    const HANDLE files = FindFirstFileW(wide, &found);
    if (files == INVALID_HANDLE_VALUE)
        return kvant_windows_failed();
    do {
        if (kvant_windows_to_utf8(found.cFileName, name, sizeof name) && see(context, name))
            break;
    } while (FindNextFileW(files, &found));
    FindClose(files);
    return true;
}

/* The C library of Windows has no streams into memory. A temporary file that is closed soon stays
 * in the cache of the system. */
bool os_stream_open(os_stream *s)
{
    *s = (os_stream){ .file = tmpfile() };
    return s->file != NULL;
}

char *os_stream_text(os_stream *s, size_t *bytes)
{
    FILE *file = s->file;
    *s = (os_stream){ .file = NULL };
    if (file == NULL)
        return NULL;
    bool ok = !ferror(file) && fflush(file) == 0;
    const int64_t end = ok ? _ftelli64(file) : -1;
    const size_t n = end > 0 ? (size_t)end : 0;
    char *text = end >= 0 ? malloc(n + 1) : NULL;
    ok = text != NULL && fseek(file, 0, SEEK_SET) == 0 && fread(text, 1, n, file) == n;
    fclose(file);
    if (!ok) {
        free(text);
        return NULL;
    }
    text[n] = 0;
    if (bytes != NULL)
        *bytes = n;
    return text;
}

bool os_errors_on_terminal(void)
{
    DWORD mode;
    return GetConsoleMode(GetStdHandle(STD_ERROR_HANDLE), &mode) &&
           (mode & ENABLE_VIRTUAL_TERMINAL_PROCESSING) != 0; /* for the progress line */
}

void os_names(char *system, char *machine, size_t bytes)
{
    SYSTEM_INFO info;
    GetNativeSystemInfo(&info);
    const WORD processor = info.wProcessorArchitecture;
    snprintf(system, bytes, "Windows");
    snprintf(machine, bytes, "%s",
             processor == PROCESSOR_ARCHITECTURE_AMD64   ? "x86_64"
             : processor == PROCESSOR_ARCHITECTURE_ARM64 ? "aarch64"
                                                         : "");
}

/* Counts all processors: Windows does not tell a process the times of a single one. */
double os_idle_cpus(void)
{
    FILETIME idle[2], kernel[2], user[2];
    double times[2][3];
    for (int i = 0; i < 2; i++) {
        if (i > 0)
            Sleep(100);
        if (!GetSystemTimes(&idle[i], &kernel[i], &user[i]))
            return HUGE_VAL;
        const FILETIME all[3] = { idle[i], kernel[i], user[i] }; /* kernel: idle, too */
        for (int k = 0; k < 3; k++)
            times[i][k] = 4294967296.0 * all[k].dwHighDateTime + all[k].dwLowDateTime;
    }
    const double total = times[1][1] - times[0][1] + times[1][2] - times[0][2];
    return total > 0 ? kvant_os_processors() * (times[1][0] - times[0][0]) / total : HUGE_VAL;
}
