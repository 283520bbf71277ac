// SPDX-License-Identifier: Apache-2.0
//! The seccomp filter that the agent installs on itself before it starts threads. Short-lived subcommands have none.
//!
//! The binary is static, so its system calls are known whatever the host. The filter of a container runtime serves any program
//! (`RuntimeDefault` allows some 350 calls). This one allows what a service proxy needs: files, memory, threads, and sockets of
//! four families. It forbids starting programs, opening namespaces and mapping memory for execution. A forbidden call fails with
//! EPERM, as without a capability; nothing is killed.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

/// What to do about a system call that the agent does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterMode {
    /// Fail it.
    Enforce,
    /// Allow it, and record it in the kernel's audit log.
    Log,
}

/// Why no filter was installed.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// Unknown architecture.
    #[error("no seccomp filter for this architecture")]
    Architecture(#[source] seccompiler::BackendError),
    /// The filter cannot be built.
    #[error("the seccomp filter cannot be built")]
    Filter(#[source] seccompiler::BackendError),
    /// The kernel refuses the filter.
    #[error("the kernel refused the seccomp filter")]
    Refused(#[from] seccompiler::Error),
}

/// Installs the filter on the calling thread and all that it starts. There is no way back.
pub fn confine(mode: FilterMode) -> Result<(), SandboxError> {
    let otherwise = match mode {
        FilterMode::Enforce => SeccompAction::Errno(libc::EPERM.unsigned_abs()),
        FilterMode::Log => SeccompAction::Log,
    };
    let arch = std::env::consts::ARCH.try_into().map_err(SandboxError::Architecture)?;
    let allowed = allowed().map_err(SandboxError::Filter)?;
    let filter =
        SeccompFilter::new(allowed, otherwise, SeccompAction::Allow, arch).map_err(SandboxError::Filter)?;
    let program: BpfProgram = filter.try_into().map_err(SandboxError::Filter)?;
    Ok(seccompiler::apply_filter(&program)?)
}

/// Calls that are allowed with any arguments.
const UNCONDITIONAL: [i64; 77] = [
    // Memory.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mremap,
    libc::SYS_munmap,
    // Threads, signals, time.
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_get_robust_list,
    libc::SYS_getcpu,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_tkill,
    // Identity and limits.
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_prlimit64,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    // Files: certificates, the token, the termination message.
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_faccessat,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_lseek,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_statx,
    libc::SYS_write,
    libc::SYS_writev,
    // Waiting.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_pipe2,
    libc::SYS_ppoll,
    // Open sockets.
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
];

/// Older forms of calls, which newer architectures lack.
#[cfg(target_arch = "x86_64")]
const OLDER_FORMS: [i64; 11] = [
    libc::SYS_accept,
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_dup2,
    libc::SYS_epoll_wait,
    libc::SYS_lstat,
    libc::SYS_open,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_stat,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_FORMS: [i64; 1] = [libc::SYS_accept];

type Backend<T> = Result<T, seccompiler::BackendError>;

/// A condition on an argument, which counts from 0: equal to a value in the bits of a mask.
fn masked(argument: u8, mask: i32, value: i32) -> Backend<SeccompCondition> {
    let bits = |number: i32| u64::from(number.cast_unsigned());
    let operator = SeccompCmpOp::MaskedEq(bits(mask));
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, bits(value))
}

/// One rule for each value that an argument may have.
fn one_of(argument: u8, values: &[i32]) -> Backend<Vec<SeccompRule>> {
    values.iter().map(|value| SeccompRule::new(vec![masked(argument, -1, *value)?])).collect()
}

fn allowed() -> Backend<BTreeMap<i64, Vec<SeccompRule>>> {
    let mut rules: BTreeMap<_, _> =
        UNCONDITIONAL.into_iter().chain(OLDER_FORMS).map(|call| (call, Vec::new())).collect();
    // Threads, not processes.
    rules.insert(
        libc::SYS_clone,
        vec![SeccompRule::new(vec![masked(0, libc::CLONE_THREAD, libc::CLONE_THREAD)?])?],
    );
    // Development builds: glibc starts threads with this call, whose flags no filter sees.
    #[cfg(target_env = "gnu")]
    rules.insert(libc::SYS_clone3, Vec::new());
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![SeccompRule::new(vec![masked(2, libc::PROT_EXEC, 0)?])?]);
    }
    // The names of threads.
    rules.insert(libc::SYS_prctl, one_of(0, &[libc::PR_SET_NAME, libc::PR_GET_NAME])?);
    let requests = [libc::FIONBIO, libc::FIOCLEX, libc::FIONREAD, libc::TCGETS, libc::TIOCGWINSZ];
    rules.insert(libc::SYS_ioctl, one_of(1, &requests.map(request))?);
    let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    rules.insert(libc::SYS_socket, one_of(0, &families)?);
    rules.insert(libc::SYS_socketpair, one_of(0, &[libc::AF_UNIX])?);
    Ok(rules)
}

/// Cannot fail for the requests above.
#[allow(clippy::useless_conversion, reason = "the type of requests differs between C libraries")]
fn request(number: libc::Ioctl) -> i32 {
    i32::try_from(number).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::net::{TcpListener, TcpStream};
    use std::process::Command;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

    use super::*;

    /// In a thread of its own: there is no way back.
    fn confined<T: Send>(mode: FilterMode, what: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                confine(mode).expect("a filter");
                what()
            });
            inside.join().expect("not killed")
        })
    }

    fn starts_a_program() -> io::Result<bool> {
        Command::new("true").status().map(|status| status.success())
    }

    #[test]
    fn no_program_is_started_and_no_other_kind_of_socket_is_opened() {
        let (program, raw) = confined(FilterMode::Enforce, || {
            let raw = socket(AddressFamily::Packet, SockType::Datagram, SockFlag::empty(), None);
            (starts_a_program(), raw.map(drop))
        });
        assert_eq!(program.expect_err("refused").kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(raw, Err(nix::Error::EPERM));
        assert!(starts_a_program().expect("outside"), "other threads are not confined");
    }

    #[test]
    fn other_namespaces_stay_closed() {
        let refused =
            confined(FilterMode::Enforce, || nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUSER));
        assert_eq!(refused, Err(nix::Error::EPERM));
    }

    #[test]
    fn threads_files_and_connections_go_on() {
        let read = confined(FilterMode::Enforce, || {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let address = listener.local_addr()?;
            let accepting = std::thread::spawn(move || listener.accept().map(drop));
            runtime.block_on(async { tokio::net::TcpStream::connect(address).await.map(drop) })?;
            accepting.join().map_err(|_| io::Error::other("panicked"))??;
            assert!(TcpStream::connect(address).is_err());
            std::fs::read_to_string("/proc/self/stat")
        });
        assert!(!read.expect("done").is_empty());
    }

    #[test]
    fn log_mode_allows_filtered_calls() {
        assert!(confined(FilterMode::Log, starts_a_program).expect("not refused"));
    }
}
