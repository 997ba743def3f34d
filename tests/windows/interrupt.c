/* interrupt.c - presses Ctrl-C. `interrupt FILE TEXT` starts the command of the variable COMMAND in
 * a new console, with all output in the file. It waits until the file holds the text, sends
 * Ctrl-C to all programs of the console, and prints the command's exit status in hexadecimal. A
 * program for tests. */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <shellapi.h>
#include <stdio.h>
#include <string.h>

#define STEP 100   /* milliseconds between two looks into the file */
#define STEPS 6000 /* looks, before the key is pressed in any case */
#define MOST_BYTES 65536

static BOOL WINAPI go_on(DWORD event)
{
    return TRUE;
}

static BOOL holds(const wchar_t *path, const char *text)
{
    static char bytes[MOST_BYTES + 1];
    FILE *file = _wfopen(path, L"rb");
    if (!file)
        return FALSE;
    bytes[fread(bytes, 1, MOST_BYTES, file)] = 0;
    fclose(file);
    return strstr(bytes, text) != NULL;
}

int main(void)
{
    static wchar_t command[32768];
    SECURITY_ATTRIBUTES inherited = { .nLength = sizeof inherited, .bInheritHandle = TRUE };
    STARTUPINFOW how = { .cb = sizeof how, .dwFlags = STARTF_USESTDHANDLES };
    PROCESS_INFORMATION made;
    char text[256];
    DWORD status;
    int n = 0;
    wchar_t **words = CommandLineToArgvW(GetCommandLineW(), &n);
    if (n != 3 || !GetEnvironmentVariableW(L"COMMAND", command, 32768))
        return 2;
    WideCharToMultiByte(CP_UTF8, 0, words[2], -1, text, sizeof text, NULL, NULL);
    how.hStdOutput = how.hStdError =
        CreateFileW(words[1], FILE_APPEND_DATA, FILE_SHARE_READ | FILE_SHARE_WRITE, &inherited,
                    CREATE_ALWAYS, 0, NULL);
    how.hStdInput = CreateFileW(L"NUL", GENERIC_READ, 0, &inherited, OPEN_EXISTING, 0, NULL);
    FreeConsole();
    AllocConsole();
    SetConsoleCtrlHandler(NULL, FALSE); /* a program inherits that Ctrl-C is ignored */
    SetConsoleCtrlHandler(go_on, TRUE); /* and no handler */
    if (!CreateProcessW(NULL, command, NULL, NULL, TRUE, 0, NULL, NULL, &how, &made))
        return 2;
    for (int i = 0; i < STEPS && !holds(words[1], text); i++)
        if (WaitForSingleObject(made.hProcess, STEP) == WAIT_OBJECT_0)
            break;
    GenerateConsoleCtrlEvent(CTRL_C_EVENT, 0);
    if (WaitForSingleObject(made.hProcess, STEP * STEPS) != WAIT_OBJECT_0)
        TerminateProcess(made.hProcess, 99);
    GetExitCodeProcess(made.hProcess, &status);
    printf("%lx\n", status);
    return 0;
}
