package testpg

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	osuser "os/user"
	"strconv"
	"syscall"
)

// user is whom the server runs as.
type user struct {
	credential *syscall.Credential // nil: as the caller
}

// unprivileged returns the caller, or who stands in for root: PostgreSQL's own
// user where there is one, else nobody. A server refuses to run as root.
func unprivileged() (user, error) {
	if os.Geteuid() != 0 {
		return user{}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := osuser.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil {
			return user{}, fmt.Errorf("user %s has the id %q: %w", name, u.Uid, err)
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			return user{}, fmt.Errorf("user %s has the group %q: %w", name, u.Gid, err)
		}
		return user{&syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, nil
	}
	return user{}, errors.New("the caller is root and there is neither a user postgres nor nobody: PostgreSQL does not run as root")
}

func (u user) own(path string) error {
	if u.credential == nil {
		return nil
	}
	return os.Chown(path, int(u.credential.Uid), int(u.credential.Gid))
}

// apply makes cmd run as u, in a session of its own so that a ^C at the tests
// leaves it to them, and end when they end, even by kill -9.
func (u user) apply(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: u.credential,
		Setsid:     true,
		Pdeathsig:  syscall.SIGQUIT, // postgres: shut down at once
	}
}
