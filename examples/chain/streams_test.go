//go:build unix

package main

import (
	"bytes"
	"context"
	"io"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/examples/chain/chainv1"
)

// The scenarios of streams as the demo runs them: they are short as they are.
func TestStreams(t *testing.T) {
	var out, progress bytes.Buffer
	if err := run(t.Context(), []string{"-scenario", "server-stream,upload"}, &out, &progress); err != nil {
		t.Fatalf("%v\n%s", err, progress.String())
	}
	noChildren(t)
	t.Log(out.String())

	for _, stack := range streamStacks {
		watched, uploaded := parseLine(t, out.String(), "server-stream", stack), parseLine(t, out.String(), "upload", stack)
		if watched["streams"] != 240 || uploaded["streams"] != 8 {
			t.Errorf("%s: %v and %v streams, want 240 and 8", stack, watched["streams"], uploaded["streams"])
		}
		var want bool
		switch stack {
		case stackNone: // what is not tried again is lost
			want = watched["lost"] > 0 && watched["broken"] > 0 && watched["repeated"] == 0 && uploaded["lost"] == 4
		case stackMiddleware: // what was delivered comes again, or is lost where the restart outlasts its retries; uploads are refused
			want = watched["repeated"]+watched["lost"] > 0 && uploaded["lost"] == 8
		case stackBelay: // streams in the middle end with the error; nothing else happens
			want = watched["lost"] == 0 && watched["broken"] > 0 && watched["repeated"] == 0 &&
				uploaded["lost"] == 0 && uploaded["repeated"] == 0
		}
		if !want {
			t.Errorf("%s: server-stream %v, upload %v", stack, watched, uploaded)
		}
	}
	if strings.Contains(out.String(), "leaf/call") {
		t.Error("there were no users, and their table is written")
	}
}

func TestStreamsOfNoStack(t *testing.T) {
	err := run(t.Context(), []string{"-scenario", "upload", "-stack", stackNoBreaker}, io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "-stack belay-nobreaker: none of them is in these scenarios") {
		t.Errorf("got %v", err)
	}
}

// scriptedLedger has one stream for each kind.
type scriptedLedger struct {
	chainv1.LedgerServiceClient

	numbers []int32 // what a watch gets
	ends    error   // and then this

	reply *chainv1.ImportResponse
}

type scriptedWatch struct {
	grpc.ServerStreamingClient[chainv1.WatchResponse]

	ledger *scriptedLedger
}

func (l *scriptedLedger) Watch(context.Context, *chainv1.WatchRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[chainv1.WatchResponse], error) {
	return &scriptedWatch{ledger: l}, nil
}

func (s *scriptedWatch) Recv() (*chainv1.WatchResponse, error) {
	if len(s.ledger.numbers) == 0 {
		return nil, s.ledger.ends
	}
	n := s.ledger.numbers[0]
	s.ledger.numbers = s.ledger.numbers[1:]
	return &chainv1.WatchResponse{Number: n}, nil
}

type scriptedImport struct {
	grpc.ClientStreamingClient[chainv1.ImportRequest, chainv1.ImportResponse]

	ledger *scriptedLedger
}

func (l *scriptedLedger) Import(context.Context, ...grpc.CallOption) (grpc.ClientStreamingClient[chainv1.ImportRequest, chainv1.ImportResponse], error) {
	return &scriptedImport{ledger: l}, nil
}

func (s *scriptedImport) Send(*chainv1.ImportRequest) error { return io.EOF }

func (s *scriptedImport) CloseAndRecv() (*chainv1.ImportResponse, error) {
	return s.ledger.reply, s.ledger.ends
}

// What is counted as what, of a watch.
func TestWatchEnds(t *testing.T) {
	gone := status.Error(codes.Unavailable, "gone")
	all := make([]int32, watchEntries)
	for i := range all {
		all[i] = int32(i) + 1
	}
	tests := []struct {
		name    string
		numbers []int32
		ends    error
		want    streamEnd
	}{
		{"all", all, io.EOF, streamEnd{}},
		{"an error before the first", nil, gone, streamEnd{Lost: true}},
		{"an error in the middle", all[:5], gone, streamEnd{Broken: true}},
		{"an end in the middle", all[:5], io.EOF, streamEnd{Lost: true}},
		{"12123", slices.Concat(all[:2], all), io.EOF, streamEnd{Repeated: 2}},
		{"as many as all, one twice and one never", slices.Concat(all[:1], all[:watchEntries-1]), io.EOF, streamEnd{Lost: true, Repeated: 1}},
	}
	for _, tt := range tests {
		a := auditor{ledger: &scriptedLedger{numbers: tt.numbers, ends: tt.ends}}
		if got := a.watch(t.Context(), func() {}); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
	}
}

// And of an upload.
func TestUploadEnds(t *testing.T) {
	tests := []struct {
		name  string
		reply *chainv1.ImportResponse
		ends  error
		want  streamEnd
	}{
		{"all", &chainv1.ImportResponse{Chunks: importChunks}, nil, streamEnd{}},
		{"an error", nil, status.Error(codes.Unavailable, "gone"), streamEnd{Lost: true}},
		{"one is missing", &chainv1.ImportResponse{Chunks: importChunks - 1}, nil, streamEnd{Lost: true}},
		{"two came again", &chainv1.ImportResponse{Chunks: importChunks, Repeated: 2}, nil, streamEnd{Repeated: 2}},
	}
	for _, tt := range tests {
		a := auditor{ledger: &scriptedLedger{reply: tt.reply, ends: tt.ends}}
		if got := a.upload(t.Context()); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
	}
}
