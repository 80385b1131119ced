package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"testing/synctest"
)

// Each cell runs in a process of its own: it starts with a heap, a scheduler
// and, in fake time, a bubble that no other cell has touched.

// workerCommand is the first argument of a process that runs one cell.
const workerCommand = "cell"

// resultFile is where a worker writes its outcome: its standard output belongs
// to package testing.
const resultFile = 3

// work runs the cell that it reads and ends the process.
func workerMain() {
	c, err := readCell(os.Stdin)
	if err == nil {
		err = runIsolated(c)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func readCell(r io.Reader) (cell, error) {
	var c cell
	err := json.NewDecoder(r).Decode(&c)
	return c, err
}

// runIsolated runs one cell and writes its outcome.
func runIsolated(c cell) error {
	finish := func() error {
		o, err := run(c)
		if err != nil {
			return err
		}
		out := os.NewFile(resultFile, "result")
		return errors.Join(json.NewEncoder(out).Encode(o), out.Close())
	}
	if !c.fake() {
		return finish()
	}
	// A bubble needs a testing.T, so this process becomes a test. Main parses
	// the command line, of which the test must not see what was for us.
	os.Args = os.Args[:1]
	testing.Main(
		func(string, string) (bool, error) { return true, nil },
		[]testing.InternalTest{{Name: "Cell", F: func(t *testing.T) {
			t.Helper()
			synctest.Test(t, func(t *testing.T) {
				if err := finish(); err != nil {
					t.Fatal(err)
				}
			})
		}}}, nil, nil)
	return nil // not reached: Main ends the process
}

// runInProcess starts a worker for a cell and waits for what it measured.
func runInProcess(ctx context.Context, c cell) (outcome, error) {
	self, err := os.Executable()
	if err != nil {
		return outcome{}, err
	}
	in, err := json.Marshal(c)
	if err != nil {
		return outcome{}, err
	}
	results, w, err := os.Pipe()
	if err != nil {
		return outcome{}, err
	}
	defer results.Close() //nolint:errcheck // it was only read
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, self, workerCommand) //nolint:gosec // this very program
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(in), &said, &said
	cmd.ExtraFiles = []*os.File{w}
	err = cmd.Start()
	if closed := w.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return outcome{}, err
	}
	var o outcome
	read := json.NewDecoder(results).Decode(&o)
	if err := cmd.Wait(); err != nil {
		return outcome{}, fmt.Errorf("%v: %w\n%s", c, err, said.Bytes())
	}
	if read != nil {
		return outcome{}, fmt.Errorf("%v: no outcome: %w\n%s", c, read, said.Bytes())
	}
	return o, nil
}
